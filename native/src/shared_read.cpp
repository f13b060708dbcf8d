#include "shared_read.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "digest.hpp"

namespace kvlink {
namespace {

constexpr std::int64_t kLeastStretchBytes = 2 * kLeafBytes;

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
  for (const std::size_t region : needed_) sources_[region] = source_region(region).memory->data();
}

Completion SharedRead::completion() const {
  Completion end = AskedRead::completion();
  end.path = path_;
  end.path_reason = path_reason_;
  return end;
}

bool SharedRead::copied(Stretch stretch, std::span<const std::uint64_t> ours, Duration took) {
  if (ours.empty()) return landed(stretch, {}, {}, took);
  auto& entry = unjudged_.emplace_back(Copied{stretch, {}});
  std::copy(ours.begin(), ours.end(), entry.digests.begin());
  return judge();
}

bool SharedRead::add_theirs(std::uint64_t first, std::span<const std::uint64_t> digests) {
  if (!spec_.integrity || first != theirs_.size() || digests.size() > ours_.size() - theirs_.size()) {
    throw ProtocolViolation("leaves " + std::to_string(first) + " to " + std::to_string(first + digests.size()) +
                            " of attempt " + std::to_string(spec_.attempt) + ", which has " +
                            std::to_string(ours_.size()) + " and is at " + std::to_string(theirs_.size()));
  }
  theirs_.insert(theirs_.end(), digests.begin(), digests.end());
  return judge();
}

bool SharedRead::judge() {
  bool again = false;
  const auto known = [this](const Copied& copied) {
    return leaf_count(copied.stretch.end) <= static_cast<std::int64_t>(theirs_.size());
  };
  while (!unjudged_.empty() && known(unjudged_.front()) && !stopped()) {
    const Copied copied = unjudged_.front();
    unjudged_.pop_front();
    const auto leaves = static_cast<std::size_t>(leaf_count(copied.stretch.end - copied.stretch.begin));
    const auto first = static_cast<std::size_t>(copied.stretch.begin / kLeafBytes);
    again |= landed(copied.stretch, std::span(theirs_).subspan(first, leaves), std::span(copied.digests).first(leaves), {});
  }
  return again;
}

}  // namespace kvlink
