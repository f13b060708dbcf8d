#include "move.hpp"

#include <cstring>

namespace kvlink {

void copy_range(const Plan& plan, std::span<const std::byte* const> source_regions,
                std::span<std::byte* const> target_regions, std::int64_t begin, std::int64_t end) {
  Cursor cursor(plan, begin, end);
  Run run;
  while (cursor.next(run)) {
    std::memcpy(target_regions[static_cast<std::size_t>(run.target_region)] + run.target_offset,
                source_regions[static_cast<std::size_t>(run.source_region)] + run.source_offset,
                static_cast<std::size_t>(run.bytes));
  }
}

}  // namespace kvlink
