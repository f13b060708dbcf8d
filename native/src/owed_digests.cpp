#include "owed_digests.hpp"

#include <utility>

namespace kvlink {

bool OwedDigests::want(Exposures& exposures, Channel& channel, const std::string& peer, AttemptId attempt) {
  auto wanted = exposures.want(peer, attempt, Clock::now());
  if (!wanted.exposure) {
    channel.failed(attempt, wanted.reason);
    return false;
  }
  wanted_.push_back(std::move(wanted.exposure));
  return true;
}

bool OwedDigests::pay(Exposures& exposures, Channel& channel) {
  if (wanted_.empty() || !channel.has_room_for_digests()) return false;
  const auto exposure = std::move(wanted_.front());
  wanted_.pop_front();
  const auto slice = exposures.digest(*exposure);
  if (!slice.digests.empty()) channel.leaves(slice.attempt, slice.first, slice.digests);
  if (slice.reason) channel.failed(slice.attempt, *slice.reason);
  if (!slice.done) wanted_.push_back(exposure);
  return true;
}

}  // namespace kvlink
