// Copies of a plan, in two parts, against the walk by loops: what must be written is, and nothing else.
#include "move.hpp"

#include "check.hpp"
#include "random_plans.hpp"

using namespace kvlink;
using namespace kvlink::testing;

int main() {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const RandomPlan random = random_plan(seed);
    const Plan plan(random.segments);
    Random rng(seed);
    std::vector<std::byte> source(static_cast<std::size_t>(random.source_bytes));
    for (std::byte& byte : source) byte = static_cast<std::byte>(rng());
    std::vector<std::byte> target(static_cast<std::size_t>(random.target_bytes), std::byte{0x5a});
    std::vector<std::byte> expected = target;
    walk(random.segments, [&](std::int64_t from, std::int64_t to, std::int64_t bytes) {
      std::copy_n(source.begin() + from, bytes, expected.begin() + to);
    });
    const std::byte* const sources[] = {source.data()};
    std::byte* const targets[] = {target.data()};
    const std::int64_t cut = pick(rng, 0, plan.total_bytes());
    copy_range(plan, sources, targets, cut, plan.total_bytes());
    copy_range(plan, sources, targets, 0, cut);
    CHECK(target == expected);
    CHECK_REFUSED(copy_range(plan, sources, targets, 0, plan.total_bytes() + 1));
  }
}
