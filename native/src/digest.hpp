// The digest scheme xxh3-64-leaf16k (docs/architecture.md, "Digest"), over the wire bytes of one side of a plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plan.hpp"

namespace kvlink {

inline constexpr std::int64_t kLeafBytes = 16 * 1024;

// XXH3-64 with seed 0, for one instruction set. All variants give the same value.
struct HashVariant {
  const char* name;
  std::uint64_t (*xxh3_64)(const void* data, std::size_t bytes);
  std::uint64_t (*leaf_block)(std::uint64_t* state, int number, const void* data);  // see hash_kernel.hpp
};

// What this CPU can run, fastest first; never empty.
std::span<const HashVariant> hash_variants();

constexpr std::int64_t leaf_count(std::int64_t total_bytes) { return (total_bytes + kLeafBytes - 1) / kLeafBytes; }

// Throws std::invalid_argument unless the plan has leaves [first, first + count).
void check_leaves(const Plan& plan, std::int64_t first, std::int64_t count);

// Writes the digests of leaves [first, first + leaves.size()) of `side` to `leaves`. `regions[r]` is where region r
// begins; the caller has checked the plan's bounds. Throws std::invalid_argument on leaves outside the plan, and for
// the target of a plan that converts, which does not hold the wire's bytes.
//
// The cost is proportional to the bytes of those leaves, whatever `first` is: a thread that must not stall digests a
// plan in slices.
void digest_leaves(const Plan& plan, Side side, std::span<const std::byte* const> regions, std::int64_t first,
                   std::span<std::uint64_t> leaves, const HashVariant& variant = hash_variants().front());

// The digests of the leaves of wire bytes that lie packed, the first of them the first of a leaf.
void digest_packed(const std::byte* packed, std::int64_t bytes, std::span<std::uint64_t> leaves);

// The root over all leaves of a transfer, in order.
std::uint64_t digest_root(std::span<const std::uint64_t> leaves);

}  // namespace kvlink
