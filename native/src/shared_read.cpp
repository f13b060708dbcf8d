#include "shared_read.hpp"

#include <errno.h>

#include <algorithm>
#include <exception>
#include <string>
#include <system_error>
#include <utility>

#include "carry.hpp"
#include "digest.hpp"

namespace kvlink {
namespace {

constexpr std::int64_t kLeastStretchBytes = 2 * kLeafBytes;
// Pulled, and not digested on the way: the kernel's work for a call is 10% of the copy of a slot's bytes (measured).
constexpr std::int64_t kPulledBytes = 1024 * 1024;
constexpr std::int64_t kPulledPieces = 8;  // of a short read, so that threads can share it

// A short read is cut so that both ends are at work: the source gathers what is next while the target scatters.
std::int64_t stretch_bytes(const ReadSpec& spec) {
  const std::int64_t share = spec.plan->total_bytes() / kRingSlots / kLeafBytes * kLeafBytes;
  return std::clamp(share, kLeastStretchBytes, kRingSlotBytes);
}

}  // namespace

SharedRead::SharedRead(ReadSpec spec, std::shared_ptr<const LocalRegions> to,
                       std::shared_ptr<const RemoteRegions> from)
    : AskedRead(spec, std::move(to), 1, stretch_bytes(spec)), from_(std::move(from)) {
  for (const Plan::Part& part : spec_.plan->parts()) {
    for (const Base& base : part.bases) needed_.push_back(static_cast<std::size_t>(base.source_region));
  }
  std::sort(needed_.begin(), needed_.end());
  needed_.erase(std::unique(needed_.begin(), needed_.end()), needed_.end());
}

void SharedRead::mapped() {
  sources_.resize(from_->held.size());
  for (const std::size_t region : needed_) {
    sources_[region] = mappings_.emplace_back(source_region(region).memory)->data();
  }
}

SharedRead::Copied SharedRead::copy_some() noexcept {
  if (!enter()) return {};
  const auto stretch = take();
  if (stretch) {
    try {
      const Time began = Clock::now();
      if (bring_in(*stretch, {})) landed(*stretch, {}, {}, Clock::now() - began);
    } catch (const std::exception& error) {
      stop(Outcome::failed, error.what());
    }
  }
  return {.bytes = stretch ? stretch->end - stretch->begin : 0, .over = exit()};
}

void SharedRead::pulled(std::shared_ptr<const PeerProcess> process) {
  process_ = std::move(process);
  far_.resize(from_->held.size());
  for (const std::size_t region : needed_) far_[region] = {source_region(region).address, source_region(region).bytes};
  if (!spec_.integrity) take_up_to(std::clamp(total() / kPulledPieces, kRingSlotBytes, kPulledBytes));
}

bool SharedRead::bring_in(Stretch stretch, std::span<std::uint64_t> leaves) {
  if (process_) return pull_in(stretch, leaves);
  const Place<const std::byte> from{.regions = sources_};
  const Place<std::byte> to{.regions = spec_.regions};
  const CarryOptions options{.stores = Stores::streamed};
  if (leaves.empty()) {
    carry(*spec_.plan, from, to, stretch.begin, stretch.end, options);
  } else {
    carry_and_digest(*spec_.plan, from, to, stretch.begin, stretch.end, leaves, options);
  }
  return true;
}

// What came counts only once it is certain whose memory it was.
bool SharedRead::pull_in(Stretch stretch, std::span<std::uint64_t> leaves) {
  try {
    pull(process_->pid(), *spec_.plan, far_, spec_.regions, stretch.begin, stretch.end, leaves);
    if (process_->is_there()) return true;
    stop(Outcome::peer_lost, "the source's process ended while its memory was read");
  } catch (const std::system_error& error) {
    if (error.code().value() == EPERM || error.code().value() == ENOSYS) process_->forbid();
    if (error.code().value() == ESRCH || !process_->is_there()) {
      stop(Outcome::peer_lost, "the source's process ended while its memory was read");
    } else if (error.code().value() == EFAULT) {
      stop(Outcome::source_failed, "the source's process has no memory any more where it said that its cache lies");
    } else {
      stop(Outcome::source_failed, error.what());
    }
  }
  return false;
}

Completion SharedRead::completion() const {
  Completion end = AskedRead::completion();
  end.path = path_;
  end.path_reason = path_reason_;
  return end;
}

}  // namespace kvlink
