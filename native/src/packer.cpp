#include "packer.hpp"

#include <algorithm>

#include "carry.hpp"

namespace kvlink {
namespace {

// What is done at a time: the thread has channels and timers to look at, too.
constexpr std::int64_t kStepBytes = 256 * 1024;

class HostJob final : public PackJob {
 public:
  HostJob(const PackRange& range, const Place<const std::byte>& from, const Place<std::byte>& to, CarryOptions options)
      : range_(range), from_(from), to_(to), options_(options), at_(range.begin) {}

  Step step() override {
    const std::int64_t end = std::min(at_ + kStepBytes, range_.end);
    if (range_.leaves.empty()) {
      carry(range_.plan, from_, to_, at_, end, options_);
    } else {
      const auto done = static_cast<std::size_t>((at_ - range_.begin) / kLeafBytes);
      carry_and_digest(range_.plan, from_, to_, at_, end, range_.leaves.subspan(done), options_);
    }
    at_ = end;
    return at_ == range_.end ? Step::done : Step::ran;
  }

 private:
  const PackRange range_;
  const Place<const std::byte> from_;
  const Place<std::byte> to_;
  const CarryOptions options_;
  std::int64_t at_;
};

}  // namespace

// A slot was read by another core last, or by a device; what is unpacked is not looked at soon.
std::unique_ptr<PackJob> HostPacker::gather(const PackRange& range, std::span<const std::byte* const> regions,
                                            std::byte* slot) {
  const std::int64_t bytes = range.end - range.begin;
  auto& found = has_runs_of(range.plan, Side::source, kStringRowBytes) ? long_rows_ : short_rows_;
  const Stores stores = bytes >= kStepBytes / 2 ? found[!range.leaves.empty()].next(bytes, Clock::now())
                                                : Stores::streamed;
  return std::make_unique<HostJob>(range, Place<const std::byte>{.regions = regions},
                                   Place<std::byte>{.packed = slot, .begin = range.begin},
                                   CarryOptions{.stores = stores});
}

std::unique_ptr<PackJob> HostPacker::scatter(const PackRange& range, const std::byte* slot,
                                             std::span<std::byte* const> regions) {
  return std::make_unique<HostJob>(range, Place<const std::byte>{.packed = slot, .begin = range.begin},
                                   Place<std::byte>{.regions = regions}, CarryOptions{.stores = Stores::streamed});
}

}  // namespace kvlink
