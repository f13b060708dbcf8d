// Copies a plan's bytes within this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plan.hpp"

namespace kvlink {

// Copies wire bytes [begin, end) from the source regions to the target regions. `..._regions[r]` is where region r
// begins; the caller has checked the plan's bounds on both sides, and that no run overlaps its own target.
// Throws std::invalid_argument on a range outside the plan, before a byte is copied.
void copy_range(const Plan& plan, std::span<const std::byte* const> source_regions,
                std::span<std::byte* const> target_regions, std::int64_t begin, std::int64_t end);

}  // namespace kvlink
