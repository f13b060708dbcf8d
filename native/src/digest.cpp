#include "digest.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "carry.hpp"
#include "isa.hpp"
#include "leaves.hpp"
#include "scout.hpp"

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
  const bool source = side == Side::source;
  Cursor cursor(plan, begin, end, walk_of(side));
  Scout scout(plan, side, regions, begin, Reads::again);  // on one host the target does, just behind
  Leaves digested(end - begin, leaves, variant);
  const MoveRows keep = move_variants().front().rows->copy[0];
  Rows rows;
  while (cursor.next_rows(rows)) {
    const std::byte* const lies = regions[static_cast<std::size_t>(source ? rows.source_region : rows.target_region)] +
                                  (source ? rows.source_offset : rows.target_offset);
    const std::int64_t stride = source ? rows.source_stride : rows.target_stride;
    std::int64_t inside = 0;  // the row
    for (std::int64_t row = 0; row < rows.count;) {
      const std::byte* const data = lies + row * stride + inside;
      const std::int64_t rest = rows.bytes - inside;
      const bool in_place = digested.wants_block() && rest >= kHashBlockBytes;
      const std::int64_t room = digested.room();
      const std::int64_t piece = in_place ? kHashBlockBytes : std::min(rest, room);
      const std::int64_t count = piece < rows.bytes ? 1 : std::clamp<std::int64_t>(room / piece, 1, rows.count - row);
      scout.fetch(count * piece);
      if (in_place) {
        digested.take_block(data);
      } else {
        keep(reinterpret_cast<char*>(digested.kept()), nullptr, reinterpret_cast<const char*>(data), count,
             {.source = stride, .target = piece}, piece);
        digested.carried(count * piece);
      }
      row += piece == rest ? count : 0;
      inside = piece == rest ? 0 : inside + piece;
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
