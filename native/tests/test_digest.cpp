// Leaf digests of scattered bytes against the hash of the same bytes gathered, for every instruction set this CPU has.
#include "digest.hpp"

#include <memory>

#include "check.hpp"
#include "hash_kernel.hpp"
#include "random_plans.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

// Memory of exactly `bytes`, so that a sanitizer sees a read past its end.
std::unique_ptr<std::byte[]> random_memory(Random& random, std::int64_t bytes) {
  auto memory = std::make_unique<std::byte[]>(static_cast<std::size_t>(bytes));
  for (std::int64_t i = 0; i < bytes; ++i) memory[static_cast<std::size_t>(i)] = static_cast<std::byte>(random());
  return memory;
}

std::vector<std::uint64_t> reference_leaves(const std::vector<std::byte>& wire) {
  std::vector<std::uint64_t> leaves;
  for (std::size_t at = 0; at < wire.size(); at += kLeafBytes) {
    const std::size_t length = std::min<std::size_t>(kLeafBytes, wire.size() - at);
    leaves.push_back(hash_variants().back().xxh3_64(wire.data() + at, length));
  }
  return leaves;
}

void leaves_are_those_of_the_gathered_bytes() {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const RandomPlan random = random_plan(seed);
    const Plan plan(random.segments);
    Random rng(seed);
    for (const Side side : {Side::source, Side::target}) {
      const bool source = side == Side::source;
      const auto memory = random_memory(rng, source ? random.source_bytes : random.target_bytes);
      std::vector<std::byte> wire;
      walk(random.segments, [&](std::int64_t from, std::int64_t to, std::int64_t bytes) {
        const std::byte* data = memory.get() + (source ? from : to);
        wire.insert(wire.end(), data, data + bytes);
      });
      const auto expected = reference_leaves(wire);
      const std::byte* const regions[] = {memory.get()};
      for (const HashVariant& variant : hash_variants()) {
        std::vector<std::uint64_t> leaves(expected.size());
        digest_leaves(plan, side, regions, 0, leaves, variant);
        CHECK(leaves == expected);
      }
      const std::int64_t first = pick(rng, 0, static_cast<std::int64_t>(expected.size()));
      std::vector<std::uint64_t> last(expected.size() - static_cast<std::size_t>(first));
      digest_leaves(plan, side, regions, first, last);
      CHECK(std::equal(last.begin(), last.end(), expected.begin() + first));
      CHECK_REFUSED(digest_leaves(plan, side, regions, first + 1, last));
      CHECK_REFUSED(digest_leaves(plan, side, regions, -1, last));
    }
  }
}

void variants_agree_at_every_length() {
  Random random(1);
  for (std::int64_t bytes = 0; bytes < 1100; ++bytes) {
    const auto memory = random_memory(random, bytes);
    const auto expected = hash_variants().back().xxh3_64(memory.get(), static_cast<std::size_t>(bytes));
    for (const HashVariant& variant : hash_variants()) {
      CHECK(variant.xxh3_64(memory.get(), static_cast<std::size_t>(bytes)) == expected);
    }
  }
}

void a_leaf_is_hashed_block_by_block() {
  Random random(2);
  const auto memory = random_memory(random, kLeafBytes);
  const auto expected = hash_variants().back().xxh3_64(memory.get(), kLeafBytes);
  for (const HashVariant& variant : hash_variants()) {
    alignas(64) std::uint64_t state[8];
    std::uint64_t digest = 0;
    for (int block = 0; block < kLeafHashBlocks; ++block) {
      digest = variant.leaf_block(state, block, memory.get() + block * kHashBlockBytes);
    }
    CHECK(digest == expected);
  }
}

void roots_are_frozen() {
  CHECK(digest_root({}) == 0x2d06800538d394c2u);
  const std::uint64_t one[] = {0xdd02fbe6d2c66464u};
  CHECK(digest_root(one) == 0xf0ab813daf2eea37u);
}

}  // namespace

int main() {
  variants_agree_at_every_length();
  a_leaf_is_hashed_block_by_block();
  roots_are_frozen();
  leaves_are_those_of_the_gathered_bytes();
}
