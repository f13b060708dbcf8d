// Ranges of random plans gathered into slots and scattered out of them, against the walk by loops: what is packed is
// the wire's bytes and digests, and what is scattered is what a move writes.
#include "packer.hpp"

#include <utility>

#include "carry.hpp"
#include "check.hpp"
#include "digest.hpp"
#include "moved.hpp"
#include "staging.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

void finish(PackJob& job) {
  for (auto step = job.step(); step != PackJob::Step::done; step = job.step()) CHECK(step == PackJob::Step::ran);
}

std::vector<std::byte> wire_of(const RandomPlan& plan, const std::byte* source) {
  std::vector<std::byte> wire;
  walk(plan.segments, [&](std::int64_t from, std::int64_t, std::int64_t bytes) {
    wire.insert(wire.end(), source + from, source + from + bytes);
  });
  return wire;
}

void packed_and_unpacked_is_moved() {
  HostPacker packer;
  const HugeMemory memory(2 * kSlotBytes);
  Slots slots(memory.data(), 2);
  for (std::uint64_t seed = 0; seed < 144; ++seed) {
    const RandomPlan random = random_moves(seed, 1);
    const Plan plan(random.segments);
    CHECK(plan.cuts_no_element());
    Random rng(seed);
    const Sides sides(random, rng);
    const auto& [source, target, expected] = sides;
    const std::byte* const sources[] = {source.data()};
    std::byte* const targets[] = {target.data()};
    const auto wire = wire_of(random, source.data());
    std::vector<std::uint64_t> digests(static_cast<std::size_t>(leaf_count(plan.total_bytes())));
    digest_leaves(plan, Side::source, sources, 0, digests);
    for (std::int64_t begin = 0; begin < plan.total_bytes();) {
      const std::int64_t end = std::min(begin + pick(rng, 1, kSlotBytes / kLeafBytes) * kLeafBytes, plan.total_bytes());
      std::byte* const slot = slots.at(static_cast<std::size_t>(pick(rng, 0, 1)));
      std::vector<std::uint64_t> theirs(static_cast<std::size_t>(leaf_count(end - begin))), ours(theirs.size());
      finish(*packer.gather({plan, begin, end, theirs}, sources, slot));
      CHECK(std::memcmp(slot, wire.data() + begin, static_cast<std::size_t>(end - begin)) == 0);
      CHECK(std::equal(theirs.begin(), theirs.end(), digests.begin() + begin / kLeafBytes));
      digest_leaves(plan, Side::source, sources, begin / kLeafBytes, ours);
      CHECK(std::exchange(ours, std::vector<std::uint64_t>(theirs.size())) == theirs);
      finish(*packer.scatter({plan, begin, end, pick(rng, 0, 1) ? std::span(ours) : std::span<std::uint64_t>()}, slot,
                             targets));
      CHECK(ours == theirs || ours.front() == 0);
      begin = end;
    }
    CHECK(target == expected);
  }
}

// A leaf's border inside an element would need bytes that are in another slot.
void a_plan_that_cuts_elements_is_not_scattered() {
  Segment bytes{.bases = {{0, 0, 0, 0}}, .pieces = {{0, 0}}, .nest = {}, .run_bytes = 1};
  Segment numbers{.bases = {{0, 1, 0, 1}}, .pieces = {{0, 0}}, .nest = {}, .run_bytes = 8};
  numbers.convert = {.source = Element::bfloat16, .target = Element::int8};
  const Plan plan({bytes, numbers});
  CHECK(!plan.cuts_no_element());
  std::byte packed[9] = {}, target[5] = {};
  std::byte* const targets[] = {target};
  CHECK_REFUSED(carry(plan, {.packed = packed}, {.regions = targets}, 0, 9));
  CHECK(Plan({numbers, bytes}).cuts_no_element());
}

void slots_are_aligned_apart_and_taken_once() {
  const HugeMemory memory(3 * kSlotBytes);
  CHECK(memory.bytes() % (2 << 20) == 0 && memory.bytes() >= 3 * kSlotBytes);
  CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % (2 << 20) == 0);
  memory.data()[memory.bytes() - 1] = std::byte{1};
  Slots slots(memory.data(), 3);
  const auto a = slots.take(), b = slots.take(), c = slots.take();
  CHECK(a && b && c && *a != *b && *b != *c && *a != *c && !slots.any_free() && !slots.take());
  CHECK(slots.at(2) - slots.at(1) == kSlotBytes && slots.offset(2) == 2 * kSlotBytes);
  slots.give_back(*b);
  CHECK(slots.any_free() && slots.take() == b);
}

}  // namespace

int main() {
  packed_and_unpacked_is_moved();
  a_plan_that_cuts_elements_is_not_scattered();
  slots_are_aligned_apart_and_taken_once();
}
