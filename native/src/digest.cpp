#include "digest.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "hash_kernel.hpp"
#include "isa.hpp"

namespace kvlink {

static_assert(std::endian::native == std::endian::little, "the root hashes leaf digests as they lie in memory");

std::span<const HashVariant> hash_variants() {
  static constexpr HashVariant all[] = {
#if defined(__x86_64__)
      {"avx512", xxh3_64_avx512, leaf_block_avx512},
      {"avx2", xxh3_64_avx2, leaf_block_avx2},
#endif
      {"baseline", xxh3_64_baseline, leaf_block_baseline},
  };
  static const std::size_t skip = isas_beyond_this_cpu();
  return std::span(all).subspan(skip);
}

void check_leaves(const Plan& plan, std::int64_t first, std::int64_t count) {
  const std::int64_t all = leaf_count(plan.total_bytes());
  if (first < 0 || first > all - count) {
    throw std::invalid_argument("leaves [" + std::to_string(first) + ", " + std::to_string(first + count) +
                                ") are outside the plan's " + std::to_string(all));
  }
}

void digest_leaves(const Plan& plan, Side side, std::span<const std::byte* const> regions, std::int64_t first,
                   std::span<std::uint64_t> leaves, const HashVariant& variant) {
  const auto count = static_cast<std::int64_t>(leaves.size());
  check_leaves(plan, first, count);
  if (side == Side::target && plan.converts()) {
    throw std::invalid_argument("the target of a plan that converts does not hold its wire bytes; digest the source");
  }
  if (count == 0) return;
  const std::int64_t begin = first * kLeafBytes;
  const std::int64_t end = std::min(begin + count * kLeafBytes, plan.total_bytes());
  Cursor cursor(plan, begin, end, walk_of(side));

  // Short runs are gathered and hashed whole: faster than XXH3's streaming state, whose own buffer is 256 bytes.
  alignas(64) std::array<std::byte, kLeafBytes> gathered;
  std::int64_t filled = 0;
  std::int64_t left = end - begin;
  std::size_t leaf = 0;
  Run run;
  while (cursor.next(run)) {
    const bool source = side == Side::source;
    const std::byte* data = regions[static_cast<std::size_t>(source ? run.source_region : run.target_region)] +
                            (source ? run.source_offset : run.target_offset);
    while (run.bytes > 0) {
      const std::int64_t leaf_bytes = std::min(kLeafBytes, left);
      const std::int64_t step = std::min(leaf_bytes - filled, run.bytes);
      const bool whole = step == leaf_bytes;
      if (!whole) std::memcpy(gathered.data() + filled, data, static_cast<std::size_t>(step));
      filled += step;
      if (filled == leaf_bytes) {
        leaves[leaf++] = variant.xxh3_64(whole ? data : gathered.data(), static_cast<std::size_t>(leaf_bytes));
        left -= leaf_bytes;
        filled = 0;
      }
      data += step;
      run.bytes -= step;
    }
  }
}

void digest_packed(const std::byte* packed, std::int64_t bytes, std::span<std::uint64_t> leaves) {
  static const HashVariant& variant = hash_variants().front();
  std::size_t leaf = 0;
  for (std::int64_t at = 0; at < bytes; at += kLeafBytes) {
    leaves[leaf++] = variant.xxh3_64(packed + at, static_cast<std::size_t>(std::min(kLeafBytes, bytes - at)));
  }
}

std::uint64_t digest_root(std::span<const std::uint64_t> leaves) {
  return hash_variants().front().xxh3_64(leaves.data(), leaves.size_bytes());
}

}  // namespace kvlink
