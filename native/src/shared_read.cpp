#include "shared_read.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "carry.hpp"
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
      carry(*spec_.plan, {.regions = sources_}, {.regions = spec_.regions}, stretch->begin, stretch->end,
            {.stores = Stores::streamed});
      landed(*stretch, {}, {}, Clock::now() - began);
    } catch (const std::exception& error) {
      stop(Outcome::failed, error.what());
    }
  }
  return {.bytes = stretch ? stretch->end - stretch->begin : 0, .over = exit()};
}

Completion SharedRead::completion() const {
  Completion end = AskedRead::completion();
  end.path = path_;
  end.path_reason = path_reason_;
  return end;
}

}  // namespace kvlink
