#include "kernel_jobs.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace kvlink {
namespace {

kernels::Divisor divisor(std::int64_t value) {
  const auto d = static_cast<std::uint64_t>(value);
  const auto shift = static_cast<std::uint32_t>(std::bit_width(d - 1));
  const std::uint64_t factor = ((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - d)) / d + 1;
  return {static_cast<std::uint32_t>(d), static_cast<std::uint32_t>(factor), shift};
}

// All terms of a side's addresses, or-ed: its low zero bits are the alignment of every one of them.
std::int64_t address_bits(const JobPart& part, Side side) {
  const bool source = side == Side::source;
  const std::int64_t run_bytes = part.nest.run_bytes;
  std::int64_t bits = source ? run_bytes : run_bytes / part.source_size() * part.target_size();
  for (const kernels::Pair& base : part.bases) bits |= source ? base.source : base.target;
  for (const kernels::Pair& piece : part.pieces) bits |= source ? piece.source : piece.target;
  for (std::size_t d = 0; d < part.nest.depth; ++d) {
    bits |= source ? part.nest.dims[d].source_stride : part.nest.dims[d].target_stride;
  }
  return bits;
}

const Conversion* conversion_of(const Plan::Part& part) { return part.convert ? &*part.convert : nullptr; }

}  // namespace

JobPart job_part(const Plan& plan, std::size_t part, std::span<const std::int64_t> source_addresses,
                 std::span<const std::int64_t> target_addresses) {
  const Plan::Part& it = plan.parts()[part];
  JobPart out{it.nest(Walk::both), {}, {}, conversion_of(it), plan.part_begin(part)};
  for (const Base& base : it.bases) {
    out.bases.push_back({source_addresses[static_cast<std::size_t>(base.source_region)] + base.source_offset,
                         target_addresses[static_cast<std::size_t>(base.target_region)] + base.target_offset});
  }
  for (const Piece& piece : it.pieces) out.pieces.push_back({piece.source_offset, piece.target_offset});
  return out;
}

JobPart packed_job_part(const Plan& plan, std::size_t part, Side side, std::span<const std::int64_t> addresses) {
  const Plan::Part& it = plan.parts()[part];
  const bool gathers = side == Side::source;
  JobPart out{it.nest(walk_of(side)), {}, {}, gathers ? nullptr : conversion_of(it), plan.part_begin(part)};
  // The wire's strides, from the innermost level outwards.
  std::int64_t bytes = out.nest.run_bytes;
  for (std::size_t d = out.nest.depth; d-- > 0;) {
    (gathers ? out.nest.dims[d].target_stride : out.nest.dims[d].source_stride) = bytes;
    bytes *= out.nest.dims[d].count;
  }
  const auto pair = [gathers](std::int64_t place, std::int64_t wire) {
    return gathers ? kernels::Pair{place, wire} : kernels::Pair{wire, place};
  };
  std::int64_t wire = 0;
  for (const Piece& piece : it.pieces) {
    out.pieces.push_back(pair(gathers ? piece.source_offset : piece.target_offset, wire));
    wire += bytes;
  }
  const std::int64_t base_bytes = wire;
  wire = out.wire_begin;
  for (const Base& base : it.bases) {
    const auto region = static_cast<std::size_t>(gathers ? base.source_region : base.target_region);
    out.bases.push_back(pair(addresses[region] + (gathers ? base.source_offset : base.target_offset), wire));
    wire += base_bytes;
  }
  return out;
}

int item_elements(const JobPart& part, std::size_t number, bool wire_aligned) {
  const std::int64_t source_size = part.source_size(), target_size = part.target_size();
  const std::int64_t source = address_bits(part, Side::source) | (wire_aligned ? part.wire_begin : 0);
  const std::int64_t target = address_bits(part, Side::target);
  for (std::int64_t n = 16 / std::max(source_size, target_size); n > 0; n /= 2) {
    if (source % (n * source_size) == 0 && target % (n * target_size) == 0) return static_cast<int>(n);
  }
  const bool is_source = source % source_size != 0;
  throw std::invalid_argument("plan segment " + std::to_string(number) + ": the " +
                              side_name(is_source ? Side::source : Side::target) + "'s elements of " +
                              std::to_string(is_source ? source_size : target_size) +
                              " bytes are not at multiples of their size");
}

int item_elements(const Plan& plan, std::size_t part, std::span<const std::int64_t> source_addresses,
                  std::span<const std::int64_t> target_addresses, bool wire_aligned) {
  return item_elements(job_part(plan, part, source_addresses, target_addresses), part, wire_aligned);
}

void PartJobs::place(const JobTables& tables) {
  const auto at = [](const float* table, std::size_t row, std::size_t columns) {
    return table == nullptr ? nullptr : table + row * columns;
  };
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].bases = tables.bases + firsts_[i].base;
    jobs[i].pieces = tables.pieces + firsts_[i].piece;
    jobs[i].source_scales = at(tables.source_scales, firsts_[i].base, scale_columns_);
    jobs[i].target_factors = at(tables.target_factors, firsts_[i].base, scale_columns_);
  }
}

// A part is a loop over levels: bases, pieces, the nest's dimensions, the items of a run. It is cut at the outermost
// level of which one step is small enough; the levels above it become jobs of their own, step by step.
class JobCutter {
 public:
  JobCutter(const JobPart& part, int elements, std::int64_t max_items, PartJobs* out)
      : part_(part), nest_(part.nest), max_items_(max_items), item_bytes_(elements * part.source_size()),
        item_target_bytes_(elements * part.target_size()), wire_(part.wire_begin), out_(out) {
    counts_ = {static_cast<std::int64_t>(part.bases.size()), static_cast<std::int64_t>(part.pieces.size())};
    for (std::size_t d = 0; d < nest_.depth; ++d) counts_.push_back(nest_.dims[d].count);
    counts_.push_back(nest_.run_bytes / item_bytes_);
    out->scale_columns_ = part.convert != nullptr ? static_cast<std::size_t>(part.convert->columns) : 1;
  }

  void cut() {
    std::vector<std::int64_t> begins;
    cut_from(0, begins);
  }

 private:
  std::int64_t items_below(std::size_t level) const {
    std::int64_t items = 1;
    for (std::size_t l = level + 1; l < counts_.size(); ++l) items *= counts_[l];
    return items;
  }

  void cut_from(std::size_t level, std::vector<std::int64_t>& begins) {
    const std::int64_t below = items_below(level);
    const std::int64_t group = std::max<std::int64_t>(1, max_items_ / below);
    for (std::int64_t begin = 0; begin < counts_[level]; begin += group) {
      begins.push_back(begin);
      if (below <= max_items_) {
        emit(begins, std::min(group, counts_[level] - begin));
      } else {
        cut_from(level + 1, begins);
      }
      begins.pop_back();
    }
  }

  // A job of `steps` steps at the level of the last of `begins`, one step at the levels above, all below.
  void emit(const std::vector<std::int64_t>& begins, std::int64_t steps) {
    const std::size_t level = begins.size() - 1;
    const auto begin = [&](std::size_t l) { return l <= level ? begins[l] : 0; };
    const auto count = [&](std::size_t l) { return l < level ? 1 : l == level ? steps : counts_[l]; };
    kernels::Job job{};
    job.wire_begin = wire_;
    job.items = static_cast<std::uint32_t>(steps * items_below(level));
    wire_ += job.items * item_bytes_;
    job.scale_columns = static_cast<std::uint32_t>(out_->scale_columns_);
    job.scale_dim = -1;
    for (std::size_t d = 0; d < nest_.depth; ++d) {
      const Dim& dim = nest_.dims[d];
      job.start.source += begin(d + 2) * dim.source_stride;
      job.start.target += begin(d + 2) * dim.target_stride;
      const bool scales = static_cast<int>(d) == nest_.scale_dim;
      if (scales) job.scale_start = static_cast<std::uint32_t>(begin(d + 2));
      if (count(d + 2) == 1) continue;
      if (scales) job.scale_dim = static_cast<std::int32_t>(job.depth);
      job.dims[job.depth++] = {dim.source_stride, dim.target_stride, divisor(count(d + 2)), 0};
    }
    const std::size_t items = counts_.size() - 1;
    job.start.source += begin(items) * item_bytes_;
    job.start.target += begin(items) * item_target_bytes_;
    job.piece_count = divisor(count(1));
    job.run_items = divisor(count(items));
    out_->jobs.push_back(job);
    out_->firsts_.push_back({static_cast<std::size_t>(begin(0)), static_cast<std::size_t>(begin(1))});
  }

  const JobPart& part_;
  const Plan::Nest& nest_;
  std::int64_t max_items_;
  std::int64_t item_bytes_;
  std::int64_t item_target_bytes_;
  std::int64_t wire_;
  std::vector<std::int64_t> counts_;  // by level
  PartJobs* out_;
};

PartJobs part_jobs(const JobPart& part, int elements, std::int64_t max_items) {
  PartJobs out;
  out.bases = part.bases;
  out.pieces = part.pieces;
  if (part.convert != nullptr) {
    out.source_scales = part.convert->source_scales;
    out.target_factors = part.convert->target_factors;
  }
  JobCutter(part, elements, max_items, &out).cut();
  return out;
}

PartJobs part_jobs(const Plan& plan, std::size_t part, std::span<const std::int64_t> source_addresses,
                   std::span<const std::int64_t> target_addresses, int elements, std::int64_t max_items) {
  return part_jobs(job_part(plan, part, source_addresses, target_addresses), elements, max_items);
}

}  // namespace kvlink
