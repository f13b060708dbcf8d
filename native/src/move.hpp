// Runs a plan within this process, on several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "carry.hpp"

namespace kvlink {

struct MoveOptions {
  int threads = 1;  // at most this many, the caller's among them
  const MoveVariant& variant = move_variants().front();
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

}  // namespace kvlink
