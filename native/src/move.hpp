// Runs a plan within this process: copies and converts its bytes, and digests them on their way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "digest.hpp"
#include "plan.hpp"
#include "row_kernel.hpp"

namespace kvlink {

struct MoveVariant {
  const char* name;
  const RowKernel* rows;
};

// What this CPU can run, fastest first; never empty. All write the same bytes.
std::span<const MoveVariant> move_variants();

struct MoveOptions {
  int threads = 1;  // at most this many, the caller's among them
  const MoveVariant& variant = move_variants().front();
  bool past_caches = false;  // however short the range: it is a piece of a long one
};

// From here on targets are written past the caches: they would only push out what others use.
inline constexpr std::int64_t kStreamFromBytes = 4 << 20;
// What one thread takes at a time.
inline constexpr std::int64_t kSliceBytes = 1 << 20;

// Moves wire bytes [begin, end) from the source regions to the target regions. `..._regions[r]` is where region r
// begins; the caller has checked the plan's bounds on both sides, and that no run overlaps its own target. Where a
// range cuts an element that is converted, the element belongs to the range that has its first byte.
// Throws std::invalid_argument on a range outside the plan, before a byte is moved.
void move_range(const Plan& plan, std::span<const std::byte* const> source_regions,
                std::span<std::byte* const> target_regions, std::int64_t begin, std::int64_t end,
                const MoveOptions& options = {});

// Moves the wire bytes of leaves [first, first + leaves.size()) and writes the leaves' digests, reading memory once.
// Throws std::invalid_argument on leaves outside the plan, before a byte is moved.
void move_and_digest(const Plan& plan, std::span<const std::byte* const> source_regions,
                     std::span<std::byte* const> target_regions, std::int64_t first, std::span<std::uint64_t> leaves,
                     const MoveOptions& options = {});

// Copies wire bytes [begin, end) of the source side to `packed`, in wire order: what is packed is the wire's, converted
// or not.
// Throws std::invalid_argument on a range outside the plan, before a byte is moved.
void gather_range(const Plan& plan, std::span<const std::byte* const> source_regions, std::int64_t begin,
                  std::int64_t end, std::byte* packed, const MoveVariant& variant = move_variants().front());

// Asks for the beginnings of the runs of wire bytes [begin, end) on the source side, which will be read soon: addresses
// are translated, and the hardware's own prefetch, which ends with each run, is under way. Throws as gather_range.
void fetch_ahead(const Plan& plan, std::span<const std::byte* const> source_regions, std::int64_t begin,
                 std::int64_t end);

// The reverse of gather_range, into the target's regions, converting where the plan does; past the caches, since `packed` is what should
// stay in them.
// Throws std::invalid_argument on a range outside the plan, or one that may cut an element that is converted
// (Plan::cuts_no_element), before a byte is moved.
void scatter_range(const Plan& plan, const std::byte* packed, std::span<std::byte* const> target_regions,
                   std::int64_t begin, std::int64_t end, const MoveVariant& variant = move_variants().front());

}  // namespace kvlink
