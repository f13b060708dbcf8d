#include "plan.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <stdexcept>
#include <string>


namespace kvlink {
namespace {

[[noreturn]] void refuse(std::size_t segment, const std::string& what) {
  throw std::invalid_argument("plan segment " + std::to_string(segment) + ": " + what);
}

void check_range(std::size_t segment, const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    refuse(segment, std::string(name) + " is " + std::to_string(value) + ", outside [" + std::to_string(low) + ", " +
                        std::to_string(high) + "]");
  }
}

// Product of positive numbers, refused above the transfer bound.
std::int64_t bounded_product(std::size_t segment, std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > kMaxTransferBytes) {
    refuse(segment, "moves more than " + std::to_string(kMaxTransferBytes) + " bytes");
  }
  return product;
}

void check_conversion(std::size_t index, const Segment& segment) {
  const Conversion& convert = *segment.convert;
  const std::int64_t bytes = convert.source_bytes();
  if (segment.run_bytes % bytes != 0) {
    refuse(index, "run_bytes is " + std::to_string(segment.run_bytes) + ", no whole number of " +
                      std::string(facts_of(convert.source).name) + " elements");
  }
  check_range(index, "scale columns", convert.columns, 1, kMaxTransferBytes);
  if (convert.columns > 1) {
    const bool known = convert.scale_dim >= 0 && convert.scale_dim < static_cast<int>(segment.nest.size());
    if (!known || segment.nest[static_cast<std::size_t>(convert.scale_dim)].count != convert.columns) {
      refuse(index, "no dimension walks its " + std::to_string(convert.columns) + " scale columns");
    }
  }
  const std::size_t entries = segment.bases.size() * static_cast<std::size_t>(convert.columns);
  for (const auto* scales : {&convert.source_scales, &convert.target_factors}) {
    if (!scales->empty() && scales->size() != entries) {
      refuse(index, "has " + std::to_string(scales->size()) + " scales for " + std::to_string(entries) +
                        " bases and columns");
    }
  }
}

// Validates every term on its own and returns the segment's bytes.
std::int64_t check_segment(std::size_t index, const Segment& segment) {
  if (segment.bases.empty()) refuse(index, "has no bases");
  if (segment.pieces.empty()) refuse(index, "has no pieces");
  if (segment.nest.size() > kMaxNestDims) {
    refuse(index, "nest has " + std::to_string(segment.nest.size()) + " dimensions, more than " +
                      std::to_string(kMaxNestDims));
  }
  for (const Base& base : segment.bases) {
    check_range(index, "source region", base.source_region, 0, kMaxRegions - 1);
    check_range(index, "target region", base.target_region, 0, kMaxRegions - 1);
    check_range(index, "source base", base.source_offset, -kMaxOffsetBytes, kMaxOffsetBytes);
    check_range(index, "target base", base.target_offset, -kMaxOffsetBytes, kMaxOffsetBytes);
  }
  for (const Piece& piece : segment.pieces) {
    check_range(index, "source piece", piece.source_offset, -kMaxOffsetBytes, kMaxOffsetBytes);
    check_range(index, "target piece", piece.target_offset, -kMaxOffsetBytes, kMaxOffsetBytes);
  }
  check_range(index, "run_bytes", segment.run_bytes, 1, kMaxTransferBytes);
  std::int64_t total = segment.run_bytes;
  for (const Dim& dim : segment.nest) {
    check_range(index, "nest count", dim.count, 1, kMaxTransferBytes);
    check_range(index, "source stride", dim.source_stride, -kMaxOffsetBytes, kMaxOffsetBytes);
    check_range(index, "target stride", dim.target_stride, -kMaxOffsetBytes, kMaxOffsetBytes);
    total = bounded_product(index, total, dim.count);
  }
  if (segment.convert) check_conversion(index, segment);
  total = bounded_product(index, total, static_cast<std::int64_t>(segment.pieces.size()));
  return bounded_product(index, total, static_cast<std::int64_t>(segment.bases.size()));
}

std::int64_t run_bytes_of(const Segment& segment, Side side) {
  if (side == Side::source || !segment.convert) return segment.run_bytes;
  return segment.run_bytes / segment.convert->source_bytes() * segment.convert->target_bytes();
}

std::int64_t stride_of(const Dim& dim, Side side) {
  return side == Side::source ? dim.source_stride : dim.target_stride;
}

}  // namespace

const char* side_name(Side side) { return side == Side::source ? "source" : "target"; }

Plan::Plan(std::vector<Segment> segments) {
  static std::atomic<std::uint64_t> made{0};
  id_ = ++made;
  parts_.reserve(segments.size());
  starts_.reserve(segments.size() + 1);
  starts_.push_back(0);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    Segment& segment = segments[i];
    const std::int64_t total = starts_.back() + check_segment(i, segment);
    if (total > kMaxTransferBytes) refuse(i, "moves more than " + std::to_string(kMaxTransferBytes) + " bytes");
    try {
      add_reach(segment, Side::source);
      add_reach(segment, Side::target);
    } catch (const std::invalid_argument& error) {
      refuse(i, error.what());
    }
    Part part;
    part.nests = {fold(segment, Walk::source), fold(segment, Walk::target), fold(segment, Walk::both)};
    part.bases = std::move(segment.bases);
    part.pieces = std::move(segment.pieces);
    part.convert = std::move(segment.convert);
    parts_.push_back(std::move(part));
    starts_.push_back(total);
  }
}

Plan::Nest Plan::fold(const Segment& segment, Walk walk) {
  const auto adjacent = [walk](const Dim& dim, std::int64_t source, std::int64_t target) {
    return (walk == Walk::target || dim.source_stride == source) &&
           (walk == Walk::source || dim.target_stride == target);
  };
  const std::size_t depth = segment.nest.size();
  const std::size_t fixed = segment.convert && segment.convert->columns > 1
                                ? static_cast<std::size_t>(segment.convert->scale_dim)
                                : depth;
  bool inner_fixed = false;  // what was put into the nest last may not grow
  std::size_t scale_from_inside = 0;
  Nest nest;
  nest.run_bytes = segment.run_bytes;
  std::int64_t target_run = run_bytes_of(segment, Side::target);
  // From the innermost outwards; dims is reversed at the end.
  for (std::size_t d = depth; d-- > 0;) {
    const Dim& dim = segment.nest[d];
    if (d == fixed) {
      scale_from_inside = nest.depth;
    } else if (dim.count == 1) {
      continue;
    } else if (nest.depth == 0) {
      if (adjacent(dim, nest.run_bytes, target_run)) {
        nest.run_bytes *= dim.count;
        target_run *= dim.count;
        continue;
      }
    } else if (!inner_fixed) {
      Dim& inner = nest.dims[nest.depth - 1];
      // The unwalked side's product may be anything, so it is not computed.
      const std::int64_t source = walk == Walk::target ? 0 : inner.count * inner.source_stride;
      const std::int64_t target = walk == Walk::source ? 0 : inner.count * inner.target_stride;
      if (adjacent(dim, source, target)) {
        inner.count *= dim.count;
        continue;
      }
    }
    inner_fixed = d == fixed;
    nest.dims[nest.depth++] = dim;
  }
  std::reverse(nest.dims.begin(), nest.dims.begin() + static_cast<std::ptrdiff_t>(nest.depth));
  if (fixed < depth) nest.scale_dim = static_cast<int>(nest.depth - 1 - scale_from_inside);
  nest.total_bytes = nest.run_bytes;
  for (std::size_t d = 0; d < nest.depth; ++d) nest.total_bytes *= nest.dims[d].count;
  return nest;
}

void Plan::add_reach(const Segment& segment, Side side) {
  const bool source = side == Side::source;
  const auto piece_offset = [source](const Piece& p) { return source ? p.source_offset : p.target_offset; };
  const auto [first, last] = std::minmax_element(
      segment.pieces.begin(), segment.pieces.end(),
      [&](const Piece& a, const Piece& b) { return piece_offset(a) < piece_offset(b); });
  std::int64_t low = piece_offset(*first);
  std::int64_t high = piece_offset(*last) + run_bytes_of(segment, side);
  for (const Dim& dim : segment.nest) {
    std::int64_t span = 0;
    if (__builtin_mul_overflow(dim.count - 1, stride_of(dim, side), &span) || span > kMaxOffsetBytes ||
        span < -kMaxOffsetBytes) {
      throw std::invalid_argument(std::string(side_name(side)) + " nest spans more than " +
                                  std::to_string(kMaxOffsetBytes) + " bytes");
    }
    (span < 0 ? low : high) += span;
  }
  std::map<std::int64_t, std::int64_t> ends;
  for (const Reach& reach : reach_[static_cast<int>(side)]) ends[reach.region] = reach.end;
  for (const Base& base : segment.bases) {
    const std::int64_t offset = source ? base.source_offset : base.target_offset;
    if (offset + low < 0) {
      throw std::invalid_argument(std::string(side_name(side)) + " offset " + std::to_string(offset + low) +
                                  " is negative");
    }
    std::int64_t& end = ends[source ? base.source_region : base.target_region];
    end = std::max(end, offset + high);
  }
  auto& reaches = reach_[static_cast<int>(side)];
  reaches.clear();
  for (const auto& [region, end] : ends) reaches.push_back({region, end});
}

void Plan::check_bounds(Side side, std::span<const std::int64_t> region_lengths) const {
  for (const Reach& reach : reach_[static_cast<int>(side)]) {
    const bool known = reach.region < static_cast<std::int64_t>(region_lengths.size());
    if (known && reach.end <= region_lengths[static_cast<std::size_t>(reach.region)]) continue;
    const std::string where = std::string(side_name(side)) + " region " + std::to_string(reach.region);
    if (!known) {
      throw std::invalid_argument("plan uses " + where + " of " + std::to_string(region_lengths.size()));
    }
    throw std::invalid_argument("plan reaches byte " + std::to_string(reach.end) + " of " + where + ", which has " +
                                std::to_string(region_lengths[static_cast<std::size_t>(reach.region)]));
  }
}

bool Plan::converts() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.convert.has_value(); });
}

bool Plan::cuts_no_element() const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {  // a leaf is a multiple of every element
    if (parts_[i].convert && starts_[i] % parts_[i].convert->source_bytes() != 0) return false;
  }
  return true;
}

std::int64_t Plan::count_runs() const {
  Cursor cursor(*this, 0, total_bytes());
  Run run;
  std::int64_t count = 0;
  while (cursor.next(run)) ++count;
  return count;
}

Cursor::Cursor(const Plan& plan, std::int64_t begin, std::int64_t end, Walk walk, std::int64_t max_run_bytes)
    : plan_(&plan), walk_(walk), max_run_bytes_(max_run_bytes) {
  if (begin < 0 || begin > end || end > plan.total_bytes()) {
    throw std::invalid_argument("wire range [" + std::to_string(begin) + ", " + std::to_string(end) +
                                ") is outside the plan's " + std::to_string(plan.total_bytes()) + " bytes");
  }
  if (max_run_bytes < 1) throw std::invalid_argument("max_run_bytes must be positive");
  remaining_ = end - begin;
  if (remaining_ == 0) return;
  const auto after = std::upper_bound(plan.starts_.begin(), plan.starts_.end(), begin);
  part_ = static_cast<std::size_t>(after - plan.starts_.begin()) - 1;
  enter_part();
  // The mixed-radix digits of `begin`, from the outermost.
  std::int64_t rest = begin - plan.starts_[part_];
  const auto pieces = static_cast<std::int64_t>(plan.parts_[part_].pieces.size());
  std::int64_t unit = nest_->total_bytes;
  const std::int64_t pair = rest / unit;
  rest %= unit;
  base_ = static_cast<std::size_t>(pair / pieces);
  piece_ = static_cast<std::size_t>(pair % pieces);
  enter_piece();
  for (std::size_t d = 0; d < nest_->depth; ++d) {
    const Dim& dim = nest_->dims[d];
    unit /= dim.count;
    digits_[d] = rest / unit;
    rest %= unit;
    source_offset_ += digits_[d] * dim.source_stride;
    target_offset_ += digits_[d] * dim.target_stride;
  }
  skip_ = rest;
  stretch_ = std::min(nest_->run_bytes - skip_, remaining_);
  remaining_ -= stretch_;
}

void Cursor::enter_part() {
  nest_ = &plan_->parts_[part_].nest(walk_);
  base_ = 0;
  piece_ = 0;
}

void Cursor::enter_piece() {
  const Plan::Part& part = plan_->parts_[part_];
  const Base& base = part.bases[base_];
  const Piece& piece = part.pieces[piece_];
  source_region_ = base.source_region;
  target_region_ = base.target_region;
  source_offset_ = base.source_offset + piece.source_offset;
  target_offset_ = base.target_offset + piece.target_offset;
}

void Cursor::advance() {
  for (std::size_t d = nest_->depth; d-- > 0;) {
    const Dim& dim = nest_->dims[d];
    if (++digits_[d] < dim.count) {
      source_offset_ += dim.source_stride;
      target_offset_ += dim.target_stride;
      return;
    }
    digits_[d] = 0;
    source_offset_ -= (dim.count - 1) * dim.source_stride;
    target_offset_ -= (dim.count - 1) * dim.target_stride;
  }
  const Plan::Part& part = plan_->parts_[part_];
  if (++piece_ == part.pieces.size()) {
    piece_ = 0;
    if (++base_ == part.bases.size()) {
      ++part_;
      enter_part();  // bytes remain, so there is a next part
    }
  }
  enter_piece();
}

bool Cursor::step() {
  if (remaining_ == 0) {
    stretch_ = 0;
    return false;
  }
  advance();
  skip_ = 0;
  stretch_ = std::min(nest_->run_bytes, remaining_);
  remaining_ -= stretch_;
  return true;
}

bool Cursor::continues(const Start& start, std::int64_t bytes) const {
  if (walk_ != Walk::source && plan_->parts_[part_].convert) return false;
  const bool source = start.source_offset + bytes == source_offset_ && start.source_region == source_region_;
  const bool target = start.target_offset + bytes == target_offset_ && start.target_region == target_region_;
  return (source || walk_ == Walk::target) && (target || walk_ == Walk::source);
}

Cursor::Start Cursor::start() const {
  return {source_region_, source_offset_ + skip_, target_region_,
          target_offset_ + plan_->parts_[part_].at_target(skip_)};
}

// The length of the run that begins at the position, which goes behind it.
std::int64_t Cursor::take(const Start& start) {
  const bool alone = walk_ != Walk::source && plan_->parts_[part_].convert;
  std::int64_t bytes = 0;
  do {
    const std::int64_t taken = std::min(stretch_, max_run_bytes_ - bytes);
    bytes += taken;
    if (taken < stretch_) {
      skip_ += taken;
      stretch_ -= taken;
      break;
    }
  } while (step() && !alone && continues(start, bytes));
  return bytes;
}

bool Cursor::next(Run& run) {
  if (stretch_ == 0) return false;
  const Start from = start();
  run = {from.source_region, from.source_offset, from.target_region, from.target_offset, take(from)};
  return true;
}

// How many runs from the position on are whole steps of the innermost dimension.
std::int64_t Cursor::whole_rows() const {
  if (nest_->depth == 0 || stretch_ != nest_->run_bytes || stretch_ > max_run_bytes_) return 0;
  const std::size_t inner = nest_->depth - 1;
  return std::min(nest_->dims[inner].count - digits_[inner], 1 + remaining_ / nest_->run_bytes);
}

bool Cursor::next_rows(Rows& rows) {
  if (stretch_ == 0) return false;
  const Plan::Part& part = plan_->parts_[part_];
  rows.part = part_;
  rows.scale = rows.scale_step = 0;
  if (part.convert) {
    rows.scale = base_ * static_cast<std::size_t>(part.convert->columns);
    if (nest_->scale_dim >= 0) {
      rows.scale += static_cast<std::size_t>(digits_[static_cast<std::size_t>(nest_->scale_dim)]);
      rows.scale_step = nest_->scale_dim + 1 == static_cast<int>(nest_->depth);
    }
  }
  rows.count = whole_rows();
  if (rows.count == 0) {
    const Start from = start();
    rows.source_region = from.source_region;
    rows.source_offset = from.source_offset;
    rows.target_region = from.target_region;
    rows.target_offset = from.target_offset;
    rows.bytes = take(from);
    rows.count = 1;
    rows.source_stride = rows.target_stride = 0;
    return true;
  }
  const std::size_t inner = nest_->depth - 1;
  const Dim& dim = nest_->dims[inner];
  rows.source_region = source_region_;
  rows.source_offset = source_offset_;
  rows.target_region = target_region_;
  rows.target_offset = target_offset_;
  rows.bytes = nest_->run_bytes;
  rows.source_stride = dim.source_stride;
  rows.target_stride = dim.target_stride;
  const std::int64_t steps = rows.count - 1;
  digits_[inner] += steps;
  source_offset_ += steps * dim.source_stride;
  target_offset_ += steps * dim.target_stride;
  remaining_ -= steps * nest_->run_bytes;
  step();
  return true;
}

}  // namespace kvlink
