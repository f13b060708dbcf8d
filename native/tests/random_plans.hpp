// Random plans that overlap on neither side, and the walk of a segment by nothing but loops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "plan.hpp"

namespace kvlink::testing {

struct RandomPlan {
  std::vector<Segment> segments;
  std::int64_t source_bytes = 0;  // both sides use region 0 only
  std::int64_t target_bytes = 0;
  std::int64_t align = 1;        // of all that is random, bytes
  bool convert = false;          // all segments, between the same two types
  Element source = Element::float16;
  Element target = Element::float16;
};

using Random = std::mt19937_64;

inline std::int64_t pick(Random& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

// Strides that lay out an index space from `*end` on, in a random axis order, with random gaps; moves `*end`.
inline std::vector<std::int64_t> lay_out(Random& random, const std::vector<std::int64_t>& counts,
                                         std::int64_t run_bytes, std::int64_t align, std::int64_t* end) {
  std::vector<std::size_t> order(counts.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::int64_t> strides(counts.size());
  std::int64_t span = run_bytes;
  for (const std::size_t axis : order) {
    strides[axis] = span + (pick(random, 0, 2) == 0 ? align * pick(random, 1, 64) : 0);
    span += strides[axis] * (counts[axis] - 1);
  }
  *end += span;
  return strides;
}

inline Conversion random_conversion(Random& random, const RandomPlan& plan, const Segment& segment) {
  Conversion convert{.source = plan.source, .target = plan.target};
  const std::int64_t dim = pick(random, -1, static_cast<std::int64_t>(segment.nest.size()) - 1);
  if (dim >= 0) {
    convert.scale_dim = static_cast<int>(dim);
    convert.columns = segment.nest[static_cast<std::size_t>(dim)].count;
  }
  for (auto* scales : {&convert.source_scales, &convert.target_factors}) {
    if (pick(random, 0, 3) == 0) continue;
    scales->resize(segment.bases.size() * static_cast<std::size_t>(convert.columns));
    for (float& scale : *scales) scale = static_cast<float>(pick(random, 1, 4000)) / 1000.0f;
  }
  return convert;
}

inline Segment random_segment(Random& random, RandomPlan* plan) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(pick(random, 2, 5)));
  std::int64_t fragments = 1;
  for (std::int64_t& count : counts) fragments *= count = pick(random, 1, 4);
  Segment segment;
  segment.run_bytes = pick(random, 1, pick(random, 0, 1) ? 8 : std::max<std::int64_t>(1, 80'000 / fragments));
  segment.run_bytes = (segment.run_bytes + plan->align - 1) / plan->align * plan->align;
  std::int64_t target_run = segment.run_bytes;
  if (plan->convert) {
    const std::int64_t elements = segment.run_bytes;
    segment.run_bytes *= facts_of(plan->source).bytes;
    target_run = elements * facts_of(plan->target).bytes;
  }
  const std::int64_t source = plan->source_bytes;
  const std::int64_t target = plan->target_bytes;
  const auto s = lay_out(random, counts, segment.run_bytes, plan->align, &plan->source_bytes);
  const auto t = lay_out(random, counts, target_run, plan->align, &plan->target_bytes);
  for (std::int64_t i = 0; i < counts[0]; ++i) segment.bases.push_back({0, source + i * s[0], 0, target + i * t[0]});
  for (std::int64_t i = 0; i < counts[1]; ++i) segment.pieces.push_back({i * s[1], i * t[1]});
  if (pick(random, 0, 1)) std::shuffle(segment.pieces.begin(), segment.pieces.end(), random);
  for (std::size_t d = 2; d < counts.size(); ++d) segment.nest.push_back({counts[d], s[d], t[d]});
  if (plan->convert) segment.convert = random_conversion(random, *plan, segment);
  return segment;
}

inline RandomPlan random_plan(std::uint64_t seed, RandomPlan plan = {}) {
  Random random(seed);
  for (std::int64_t i = pick(random, 1, 3); i > 0; --i) plan.segments.push_back(random_segment(random, &plan));
  return plan;
}

// Calls visit(source_offset, target_offset, run_bytes) or visit(..., segment, scale_index) for every innermost pass, in
// wire order.
template <typename Visit>
void walk_dims(const Segment& segment, std::size_t d, std::int64_t source, std::int64_t target, std::size_t scale,
               const Visit& visit) {
  if (d == segment.nest.size()) {
    if constexpr (std::is_invocable_v<Visit, std::int64_t, std::int64_t, std::int64_t>) {
      visit(source, target, segment.run_bytes);
    } else {
      visit(source, target, segment.run_bytes, segment, scale);
    }
    return;
  }
  const bool scales = segment.convert && segment.convert->scale_dim == static_cast<int>(d);
  for (std::int64_t i = 0; i < segment.nest[d].count; ++i) {
    walk_dims(segment, d + 1, source + i * segment.nest[d].source_stride, target + i * segment.nest[d].target_stride,
              scale + (scales ? static_cast<std::size_t>(i) : 0), visit);
  }
}

template <typename Visit>
void walk(const std::vector<Segment>& segments, const Visit& visit) {
  for (const Segment& segment : segments) {
    for (std::size_t b = 0; b < segment.bases.size(); ++b) {
      const Base& base = segment.bases[b];
      const std::size_t scale = segment.convert ? b * static_cast<std::size_t>(segment.convert->columns) : 0;
      for (const Piece& piece : segment.pieces) {
        walk_dims(segment, 0, base.source_offset + piece.source_offset, base.target_offset + piece.target_offset,
                  scale, visit);
      }
    }
  }
}

}  // namespace kvlink::testing
