// A plan as jobs of the kernels (kernels/relayout.hpp): what a launch is given, on a GPU or on the host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/relayout.hpp"
#include "plan.hpp"

namespace kvlink {

// Where a part's tables lie in the memory of whoever runs its jobs. Scales are null where the part has none.
struct JobTables {
  const kernels::Pair* bases;
  const kernels::Pair* pieces;
  const float* source_scales;
  const float* target_factors;
};

// One part of a plan.
struct PartJobs {
  std::vector<kernels::Pair> bases;  // addresses
  std::vector<kernels::Pair> pieces;
  std::vector<float> source_scales;
  std::vector<float> target_factors;
  std::vector<kernels::Job> jobs;    // in wire order; not runnable before `place`

  // Points the jobs at tables, copies of those above.
  void place(const JobTables& tables);

 private:
  friend class JobCutter;
  struct First {
    std::size_t base;
    std::size_t piece;
  };
  std::vector<First> firsts_;  // a job's first entries of the tables
  std::size_t scale_columns_ = 1;
};

// One part of a plan as its jobs see it: where both sides lie, level by level. A side that is packed lies in wire order
// and without gaps, as in a staging slot: its addresses are wire offsets, and a launch shifts them to the slot.
struct JobPart {
  Plan::Nest nest;
  std::vector<kernels::Pair> bases;
  std::vector<kernels::Pair> pieces;
  const Conversion* convert;  // null for copies
  std::int64_t wire_begin;

  std::int64_t source_size() const { return convert != nullptr ? convert->source_bytes() : 1; }
  std::int64_t target_size() const { return convert != nullptr ? convert->target_bytes() : 1; }
};

// From region to region. `..._addresses[r]` is where region r begins; the caller has checked the plan's bounds.
JobPart job_part(const Plan& plan, std::size_t part, std::span<const std::int64_t> source_addresses,
                 std::span<const std::int64_t> target_addresses);
// Between `side`'s regions and packed bytes. The wire carries the source's elements: only from it are they converted.
JobPart packed_job_part(const Plan& plan, std::size_t part, Side side, std::span<const std::int64_t> addresses);

// How many elements (bytes, where nothing converts) an item of this part has: the most of 16, 8, 4, 2, 1 for which
// every item is aligned on both sides and no longer than 16 bytes on either. With `wire_aligned`, the part's wire
// offset is a multiple too, so that no leaf begins inside an item, as digesting and ranges need.
// Throws std::invalid_argument, naming the part and the side, if not even single elements are aligned, which a GPU
// cannot load.
int item_elements(const JobPart& part, std::size_t number, bool wire_aligned);
int item_elements(const Plan& plan, std::size_t part, std::span<const std::int64_t> source_addresses,
                  std::span<const std::int64_t> target_addresses, bool wire_aligned);

PartJobs part_jobs(const JobPart& part, int elements, std::int64_t max_items = kernels::kMaxItems - 1);
PartJobs part_jobs(const Plan& plan, std::size_t part, std::span<const std::int64_t> source_addresses,
                   std::span<const std::int64_t> target_addresses, int elements,
                   std::int64_t max_items = kernels::kMaxItems - 1);

}  // namespace kvlink
