// Plans moved and converted, in parts, by every instruction set, at any alignment, against the walk by loops: what must
// be written is, and nothing else.
#include "move.hpp"

#include <cfenv>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "check.hpp"
#include "moved.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

void every_variant_writes_what_the_loops_write() {
  for (std::uint64_t seed = 0; seed < 144; ++seed) {
    const RandomPlan random = random_moves(seed, 1);
    const Plan plan(random.segments);
    Random rng(seed);
    const Sides sides(random, rng);
    const auto& [source, target, expected] = sides;
    const std::byte* const sources[] = {source.data()};
    std::byte* const targets[] = {target.data()};
    for (const MoveVariant& variant : move_variants()) {
      sides.wipe();
      const std::int64_t cut = pick(rng, 0, plan.total_bytes());
      move_range(plan, sources, targets, cut, plan.total_bytes(), {.variant = variant});
      move_range(plan, sources, targets, 0, cut, {.variant = variant});
      CHECK(target == expected);
    }
    CHECK_REFUSED(move_range(plan, sources, targets, 0, plan.total_bytes() + 1));
  }
}

// Long enough for streaming stores and several slices; rows of 200 bytes at 232, so that lines are cut everywhere.
Plan long_plan(bool convert, std::int64_t* source_bytes, std::int64_t* target_bytes) {
  const std::int64_t rows = kStreamFromBytes / 200 + 77;
  Segment segment{.bases = {{0, 0, 0, 0}}, .pieces = {{0, 0}}, .nest = {{rows, 232, 208}}, .run_bytes = 200};
  if (convert) segment.convert = {.source = Element::bfloat16, .target = Element::float8_e4m3};
  *source_bytes = (rows - 1) * 232 + 200;
  *target_bytes = (rows - 1) * 208 + (convert ? 100 : 200);
  return Plan({segment});
}

void threads_and_streaming_change_nothing() {
  for (const bool convert : {false, true}) {
    std::int64_t source_bytes = 0, target_bytes = 0;
    const Plan plan = long_plan(convert, &source_bytes, &target_bytes);
    Random rng(3);
    const Memory source(source_bytes, 7);
    source.fill(rng);
    const std::byte* const sources[] = {source.data()};
    const Memory expected(target_bytes, 9);
    std::memset(expected.data(), 0, expected.size());
    std::byte* const expected_regions[] = {expected.data()};
    for (std::int64_t at = 0; at < plan.total_bytes(); at += 100'000) {  // short moves: none of them streams
      move_range(plan, sources, expected_regions, at, std::min(at + 100'000, plan.total_bytes()),
                 {.variant = move_variants().back()});
    }
    std::vector<std::uint64_t> expected_leaves(static_cast<std::size_t>(leaf_count(plan.total_bytes())));
    digest_leaves(plan, Side::source, sources, 0, expected_leaves);
    for (const MoveVariant& variant : move_variants()) {
      for (const int threads : {1, 3}) {
        const Memory target(target_bytes, 9);
        std::byte* const targets[] = {target.data()};
        std::memset(target.data(), 0, target.size());
        move_range(plan, sources, targets, 0, plan.total_bytes(), {.threads = threads, .variant = variant});
        CHECK(target == expected);
        std::memset(target.data(), 0, target.size());
        std::vector<std::uint64_t> leaves(expected_leaves.size());
        move_and_digest(plan, sources, targets, 0, leaves, {.threads = threads, .variant = variant});
        CHECK(target == expected);
        CHECK(leaves == expected_leaves);
      }
    }
  }
}

void digested_leaves_are_moved_and_no_others() {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const RandomPlan random = random_moves(seed, 1);
    const Plan plan(random.segments);
    Random rng(seed);
    const Memory source(random.source_bytes, 0);
    source.fill(rng);
    const Memory target(random.target_bytes, 0), expected(random.target_bytes, 0);
    std::memset(target.data(), 0x33, target.size());
    std::memset(expected.data(), 0x33, expected.size());
    const std::byte* const sources[] = {source.data()};
    std::byte* const targets[] = {target.data()};
    std::byte* const expected_regions[] = {expected.data()};
    const std::int64_t all = leaf_count(plan.total_bytes());
    const std::int64_t first = pick(rng, 0, all);
    std::vector<std::uint64_t> leaves(static_cast<std::size_t>(pick(rng, 0, all - first)));
    std::vector<std::uint64_t> expected_leaves(leaves.size());
    move_and_digest(plan, sources, targets, first, leaves);
    digest_leaves(plan, Side::source, sources, first, expected_leaves);
    CHECK(leaves == expected_leaves);
    const std::int64_t begin = std::min(first * kLeafBytes, plan.total_bytes());
    const auto count = static_cast<std::int64_t>(leaves.size());
    move_range(plan, sources, expected_regions, begin, std::min(begin + count * kLeafBytes, plan.total_bytes()));
    CHECK(target == expected);
    std::vector<std::uint64_t> too_many(static_cast<std::size_t>(all - first + 1));
    CHECK_REFUSED(move_and_digest(plan, sources, targets, first, too_many));
  }
}

// A caller's thread may flush subnormals and round otherwise; that is put aside, and put back.
void the_callers_rounding_changes_no_bit() {
  const float source[] = {0x1p-130f, 0x1.000002p-126f, 1.00390625f, -0x1.8p-140f};
  Segment segment{.bases = {{0, 0, 0, 0}}, .pieces = {{0, 0}}, .nest = {}, .run_bytes = sizeof(source)};
  segment.convert = {.source = Element::float32, .target = Element::float32, .source_scales = {0.7f}};
  const Plan plan({segment});
  float expected[4], got[4];
  for (std::size_t i = 0; i < 4; ++i) {
    const volatile float value = source[i];
    expected[i] = value * 0.7f;
  }
  const std::byte* const sources[] = {reinterpret_cast<const std::byte*>(source)};
  std::byte* const targets[] = {reinterpret_cast<std::byte*>(got)};
  std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
#endif
  move_range(plan, sources, targets, 0, plan.total_bytes());
  CHECK(std::fegetround() == FE_UPWARD);
#if defined(__x86_64__)
  CHECK(_MM_GET_FLUSH_ZERO_MODE() == _MM_FLUSH_ZERO_ON);
#endif
  std::fesetenv(FE_DFL_ENV);
  CHECK(std::memcmp(got, expected, sizeof(got)) == 0);
}

}  // namespace

int main() {
  every_variant_writes_what_the_loops_write();
  threads_and_streaming_change_nothing();
  digested_leaves_are_moved_and_no_others();
  the_callers_rounding_changes_no_bit();
}
