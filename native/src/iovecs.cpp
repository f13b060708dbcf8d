#include "iovecs.hpp"

namespace kvlink {

bool Iovecs::add_runs(Cursor& cursor, Side side, std::span<const std::byte* const> regions, std::size_t keep) {
  pieces_.reserve(kMax);
  if (first_ > 0) pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<std::ptrdiff_t>(first_));
  first_ = 0;
  const bool source = side == Side::source;
  Run run;
  while (pieces_.size() + keep < kMax) {
    if (!cursor.next(run)) return false;
    const auto region = static_cast<std::size_t>(source ? run.source_region : run.target_region);
    add(regions[region] + (source ? run.source_offset : run.target_offset), static_cast<std::size_t>(run.bytes));
  }
  return true;
}

void Iovecs::consume(std::size_t bytes) {
  while (first_ < pieces_.size() && bytes >= pieces_[first_].iov_len) bytes -= pieces_[first_++].iov_len;
  if (bytes > 0) {
    iovec& piece = pieces_[first_];
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + bytes;
    piece.iov_len -= bytes;
  }
  if (empty()) clear();
}

}  // namespace kvlink
