#include "move.hpp"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace kvlink {
namespace {

// Hashing follows converting in steps that stay in a core's cache between the two.
constexpr std::int64_t kConvertedLeaves = 4;
static_assert(kSliceBytes % (kConvertedLeaves * kLeafBytes) == 0, "a slice is whole steps");

// Calls work(slice) for every slice, each on one of up to `threads` threads. Slices are taken in order, so that all
// threads walk the same stretch of the source.
template <class Work>
void for_slices(std::int64_t slices, int threads, const Work& work) {
  std::atomic<std::int64_t> next{0};
  const auto worker = [&] {
    for (std::int64_t slice = next++; slice < slices; slice = next++) work(slice);
  };
  std::vector<std::jthread> others;
  for (std::int64_t i = 1; i < std::min<std::int64_t>(threads, slices); ++i) {
    try {
      others.emplace_back(worker);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: fewer do the same
    }
  }
  worker();
}

CarryOptions carry_options(const MoveOptions& options, std::int64_t bytes) {
  return {.stores = bytes >= kStreamFromBytes ? Stores::streamed : Stores::plain, .variant = options.variant};
}

}  // namespace

void move_range(const Plan& plan, std::span<const std::byte* const> source_regions,
                std::span<std::byte* const> target_regions, std::int64_t begin, std::int64_t end,
                const MoveOptions& options) {
  static_cast<void>(Cursor(plan, begin, end));  // refuses a range outside the plan
  const CarryOptions how = carry_options(options, end - begin);
  const std::int64_t slices = (end - begin + kSliceBytes - 1) / kSliceBytes;
  for_slices(slices, options.threads, [&](std::int64_t slice) {
    const std::int64_t from = begin + slice * kSliceBytes;
    carry(plan, {.regions = source_regions}, {.regions = target_regions}, from, std::min(end, from + kSliceBytes), how);
  });
}

void move_and_digest(const Plan& plan, std::span<const std::byte* const> source_regions,
                     std::span<std::byte* const> target_regions, std::int64_t first, std::span<std::uint64_t> leaves,
                     const MoveOptions& options) {
  const auto count = static_cast<std::int64_t>(leaves.size());
  check_leaves(plan, first, count);
  const CarryOptions how = carry_options(options, count * kLeafBytes);
  const std::int64_t most = (plan.converts() ? kConvertedLeaves : kSliceBytes / kLeafBytes);
  constexpr std::int64_t leaves_per_slice = kSliceBytes / kLeafBytes;
  const std::int64_t slices = (count + leaves_per_slice - 1) / leaves_per_slice;
  for_slices(slices, options.threads, [&](std::int64_t slice) {
    const std::int64_t last = std::min(count, (slice + 1) * leaves_per_slice);
    for (std::int64_t leaf = slice * leaves_per_slice; leaf < last; leaf += most) {
      const auto digests = leaves.subspan(static_cast<std::size_t>(leaf),
                                          static_cast<std::size_t>(std::min(most, last - leaf)));
      const std::int64_t begin = (first + leaf) * kLeafBytes;
      const std::int64_t end = std::min((first + std::min(leaf + most, last)) * kLeafBytes, plan.total_bytes());
      const Place<const std::byte> from{.regions = source_regions};
      if (!plan.converts()) {
        carry_and_digest(plan, from, {.regions = target_regions}, begin, end, digests, how);
        continue;
      }
      carry(plan, from, {.regions = target_regions}, begin, end, how);  // wherever elements are cut
      digest_leaves(plan, Side::source, source_regions, first + leaf, digests);
    }
  });
}

}  // namespace kvlink
