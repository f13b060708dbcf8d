#include "packer.hpp"

#include <algorithm>

#include "digest.hpp"
#include "move.hpp"

namespace kvlink {
namespace {

// What is done at a time: the thread has channels and timers to look at, too.
constexpr std::int64_t kStepBytes = 256 * 1024;
// Within it, bytes are hashed while they are in the nearest cache.
constexpr std::int64_t kHashBytes = 4 * kLeafBytes;
static_assert(kStepBytes % kHashBytes == 0);

// Derived ones move; all hash what lies packed, and so need no second walk of the plan.
class HostJob : public PackJob {
 public:
  HostJob(const PackRange& range, const std::byte* slot) : range_(range), slot_(slot), at_(range.begin) {}

  Step step() override {
    for (const std::int64_t stop = std::min(at_ + kStepBytes, range_.end); at_ < stop;) {
      const std::int64_t end = std::min(at_ + kHashBytes, stop);
      const std::byte* packed = slot_ + (at_ - range_.begin);
      move(at_, end, packed);
      if (!range_.leaves.empty()) {
        const auto first = static_cast<std::size_t>((at_ - range_.begin) / kLeafBytes);
        digest_packed(packed, end - at_, range_.leaves.subspan(first));
      }
      at_ = end;
    }
    return at_ == range_.end ? Step::done : Step::ran;
  }

 protected:
  virtual void move(std::int64_t begin, std::int64_t end, const std::byte* packed) = 0;

  const PackRange range_;

 private:
  const std::byte* const slot_;
  std::int64_t at_;
};

class Gather final : public HostJob {
 public:
  Gather(const PackRange& range, std::span<const std::byte* const> regions, std::byte* slot)
      : HostJob(range, slot), regions_(regions), slot_(slot) {}

 private:
  void move(std::int64_t begin, std::int64_t end, const std::byte*) override {
    gather_range(range_.plan, regions_, begin, end, slot_ + (begin - range_.begin));
    fetch_ahead(range_.plan, regions_, end, std::min(end + kHashBytes, range_.plan.total_bytes()));
  }

  const std::span<const std::byte* const> regions_;
  std::byte* const slot_;
};

class Scatter final : public HostJob {
 public:
  Scatter(const PackRange& range, const std::byte* slot, std::span<std::byte* const> regions)
      : HostJob(range, slot), regions_(regions) {}

 private:
  void move(std::int64_t begin, std::int64_t end, const std::byte* packed) override {
    scatter_range(range_.plan, packed, regions_, begin, end);
  }

  const std::span<std::byte* const> regions_;
};

}  // namespace

std::unique_ptr<PackJob> HostPacker::gather(const PackRange& range, std::span<const std::byte* const> regions,
                                            std::byte* slot) {
  return std::make_unique<Gather>(range, regions, slot);
}

std::unique_ptr<PackJob> HostPacker::scatter(const PackRange& range, const std::byte* slot,
                                             std::span<std::byte* const> regions) {
  return std::make_unique<Scatter>(range, slot, regions);
}

}  // namespace kvlink
