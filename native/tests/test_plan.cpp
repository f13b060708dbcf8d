// The cursor against the walk by loops, from and to anywhere; refusals. Meant for the sanitizers, too.
#include "plan.hpp"

#include <utility>

#include "check.hpp"
#include "random_plans.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

using Places = std::vector<std::pair<std::int64_t, std::int64_t>>;  // of every wire byte: source, target

Places reference_places(const std::vector<Segment>& segments) {
  Places places;
  walk(segments, [&](std::int64_t source, std::int64_t target, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; ++i) places.emplace_back(source + i, target + i);
  });
  return places;
}

void check_walk(const Plan& plan, const Places& places, std::int64_t begin, std::int64_t end, Walk side,
                std::int64_t limit) {
  Cursor cursor(plan, begin, end, side, limit);
  Run run;
  std::int64_t at = begin;
  while (cursor.next(run)) {
    CHECK(run.bytes > 0 && run.bytes <= limit && at + run.bytes <= end);
    for (std::int64_t i = 0; i < run.bytes; ++i, ++at) {
      const auto [source, target] = places[static_cast<std::size_t>(at)];
      if (side != Walk::target) CHECK(run.source_region == 0 && run.source_offset + i == source);
      if (side != Walk::source) CHECK(run.target_region == 0 && run.target_offset + i == target);
    }
    if (at == end || run.bytes == limit) continue;
    // Maximal: the next byte does not continue this run.
    const auto [source, target] = places[static_cast<std::size_t>(at)];
    const bool source_on = side == Walk::target || run.source_offset + run.bytes == source;
    const bool target_on = side == Walk::source || run.target_offset + run.bytes == target;
    CHECK(!(source_on && target_on));
  }
  CHECK(at == end);
  CHECK(!cursor.next(run));
}

void the_cursor_walks_what_the_loops_walk() {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    const RandomPlan random = random_plan(seed);
    const Plan plan(random.segments);
    const Places places = reference_places(random.segments);
    const auto total = static_cast<std::int64_t>(places.size());
    CHECK(plan.total_bytes() == total);
    Random rng(seed);
    for (const Walk side : {Walk::source, Walk::target, Walk::both}) {
      check_walk(plan, places, 0, total, side, total);
      const std::int64_t begin = pick(rng, 0, total);
      const std::int64_t end = pick(rng, begin, total);
      check_walk(plan, places, begin, end, side, total);
      check_walk(plan, places, begin, end, side, pick(rng, 1, 20'000));
    }
  }
}

void bounds_are_exact() {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const RandomPlan random = random_plan(seed);
    const Plan plan(random.segments);
    const std::int64_t source[] = {random.source_bytes};
    const std::int64_t target[] = {random.target_bytes};
    plan.check_bounds(Side::source, source);
    plan.check_bounds(Side::target, target);
    const std::int64_t short_source[] = {random.source_bytes - 1};
    const std::int64_t short_target[] = {random.target_bytes - 1};
    CHECK_REFUSED(plan.check_bounds(Side::source, short_source));
    CHECK_REFUSED(plan.check_bounds(Side::target, short_target));
    CHECK_REFUSED(plan.check_bounds(Side::source, {}));
  }
}

void runs_do_not_cross_regions() {
  Segment segment;
  segment.run_bytes = 8;
  segment.pieces = {{0, 0}};
  segment.bases = {{0, 0, 0, 0}, {1, 8, 0, 8}, {1, 16, 2, 16}};
  const Plan plan({segment});
  CHECK(plan.count_runs() == 3);
  Run run;
  Cursor source(plan, 0, 24, Walk::source);
  CHECK(source.next(run) && run.source_region == 0 && run.bytes == 8);
  CHECK(source.next(run) && run.source_region == 1 && run.source_offset == 8 && run.bytes == 16);
  Cursor target(plan, 0, 24, Walk::target);
  CHECK(target.next(run) && run.target_region == 0 && run.bytes == 16);
  CHECK(target.next(run) && run.target_region == 2 && run.target_offset == 16 && run.bytes == 8);
}

void an_empty_plan_has_no_runs() {
  const Plan plan({});
  CHECK(plan.total_bytes() == 0 && plan.count_runs() == 0);
  Cursor cursor(plan, 0, 0);
  Run run;
  CHECK(!cursor.next(run));
  CHECK_REFUSED(Cursor(plan, 0, 1));
}

Segment one_run() {
  Segment segment;
  segment.bases = {{0, 0, 0, 0}};
  segment.pieces = {{0, 0}};
  segment.run_bytes = 8;
  return segment;
}

template <typename Change>
void check_refused(const Change& change) {
  Segment segment = one_run();
  change(segment);
  CHECK_REFUSED(Plan({segment}));
}

void impossible_plans_are_refused() {
  constexpr std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  check_refused([](Segment& s) { s.bases.clear(); });
  check_refused([](Segment& s) { s.pieces.clear(); });
  check_refused([](Segment& s) { s.nest.assign(kMaxNestDims + 1, {1, 0, 0}); });
  check_refused([](Segment& s) { s.nest = {{std::int64_t{1} << 40, 0, 0}, {std::int64_t{1} << 40, 0, 0}}; });
  check_refused([](Segment& s) { s.nest = {{2, -1, 0}}; });
  for (const std::int64_t bad : {lowest, std::int64_t{-1}, highest}) {
    check_refused([bad](Segment& s) { s.run_bytes = bad; });
    check_refused([bad](Segment& s) { s.nest = {{bad, 1, 1}}; });
    check_refused([bad](Segment& s) { s.nest = {{3, bad, 0}}; });
    check_refused([bad](Segment& s) { s.nest = {{3, 0, bad}}; });
    check_refused([bad](Segment& s) { s.bases[0].source_region = bad; });
    check_refused([bad](Segment& s) { s.bases[0].target_offset = bad; });
    check_refused([bad](Segment& s) { s.pieces[0].source_offset = bad; });
    CHECK_REFUSED(Cursor(Plan({one_run()}), bad, highest));
  }
  CHECK_REFUSED(Cursor(Plan({one_run()}), 0, 8, Walk::both, 0));
}

}  // namespace

int main() {
  the_cursor_walks_what_the_loops_walk();
  bounds_are_exact();
  runs_do_not_cross_regions();
  an_empty_plan_has_no_runs();
  impossible_plans_are_refused();
}
