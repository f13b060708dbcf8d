// Asks memory for a plan's bytes before they are wanted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "plan.hpp"

namespace kvlink {

// A walk asks for what it will read this much later. Runs at random places cost a wait for memory each unless several
// are under way, and the hardware's own prefetch stops with each page of 4 KiB.
inline constexpr std::int64_t kAheadBytes = 8192;

// Whether anybody reads the same bytes soon: this core, or one that shares its outer cache.
enum class Reads { once, again };

// Long rows that are read once are asked for past the outer caches: those keep what they hold, and two cores copy 5 to
// 10% more (1 MiB, measured). Shorter ones, often at a power of two from each other, would push each other out of the
// inner one.
inline constexpr std::int64_t kPastCachesBytes = 4096;

template <int kLocality>
void fetch_lines(const std::byte* data, std::int64_t bytes) {
  constexpr std::int64_t line_bytes = 64;
  for (std::int64_t at = 0; at < bytes; at += line_bytes) __builtin_prefetch(data + at, 0, kLocality);
}

inline void fetch_lines(const std::byte* data, std::int64_t bytes, bool past_caches) {
  past_caches ? fetch_lines<0>(data, bytes) : fetch_lines<3>(data, bytes);
}

// Walks one side kAheadBytes before the walk itself, past its end, too: what follows is wanted next.
class Scout {
 public:
  Scout(const Plan& plan, Side side, std::span<const std::byte* const> regions, std::int64_t begin, Reads reads)
      : regions_(regions), side_(side), reads_(reads),
        cursor_(plan, std::min(begin + kAheadBytes, plan.total_bytes()), plan.total_bytes(), walk_of(side)) {}
  Scout(const Scout&) = delete;
  Scout& operator=(const Scout&) = delete;

  void fetch(std::int64_t bytes) {
    while (bytes > 0 && (left_ > 0 || next_row())) {
      const std::int64_t piece = std::min(bytes, left_);
      fetch_lines(data_, piece, past_caches_);
      data_ += piece;
      left_ -= piece;
      bytes -= piece;
    }
  }

 private:
  bool next_row() {
    if (++row_ < rows_.count) {
      data_ = first_ + row_ * stride_;
    } else {
      if (!cursor_.next_rows(rows_)) return false;
      const bool source = side_ == Side::source;
      stride_ = source ? rows_.source_stride : rows_.target_stride;
      first_ = data_ = regions_[static_cast<std::size_t>(source ? rows_.source_region : rows_.target_region)] +
                       (source ? rows_.source_offset : rows_.target_offset);
      row_ = 0;
      past_caches_ = reads_ == Reads::once && rows_.bytes >= kPastCachesBytes;
    }
    left_ = rows_.bytes;
    return true;
  }

  const std::span<const std::byte* const> regions_;
  const Side side_;
  const Reads reads_;
  Cursor cursor_;
  Rows rows_{};
  bool past_caches_ = false;  // this row and those like it
  std::int64_t row_ = 0;
  std::int64_t stride_ = 0;
  const std::byte* first_ = nullptr;
  const std::byte* data_ = nullptr;
  std::int64_t left_ = 0;
};

}  // namespace kvlink
