// The digests of leaves whose bytes come piece by piece, in wire order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "digest.hpp"
#include "hash_kernel.hpp"

namespace kvlink {

// Asking memory and reading it take turns in pieces of this: more at a time than a core can wait for would stall both
// (measured).
inline constexpr std::int64_t kDigestedPieceBytes = 512;
static_assert(kHashBlockBytes % kDigestedPieceBytes == 0 && kHashBlockBytes * kLeafHashBlocks == kLeafBytes);

// Hashes each block as soon as it is full, from a copy in the nearest cache, or where it lies. Of a leaf no more than a
// block is kept: what is read ahead needs that cache, too (10% of a copy's speed).
class Leaves {
 public:
  Leaves(std::int64_t bytes, std::span<std::uint64_t> leaves, const HashVariant& variant = hash_variants().front())
      : hash_(variant), leaves_(leaves), left_(bytes) {
    begin();
  }

  // How much to put to kept() next, at most.
  std::int64_t room() const {
    return std::min(kDigestedPieceBytes - filled_ % kDigestedPieceBytes, leaf_bytes_ - filled_);
  }
  std::byte* kept() { return kept_.data() + (blocks_ ? filled_ % kHashBlockBytes : filled_); }
  // So many bytes were put there.
  void carried(std::int64_t bytes) {
    filled_ += bytes;
    if (blocks_) {
      if (filled_ % kHashBlockBytes == 0) hash_block(kept_.data());
    } else if (filled_ == leaf_bytes_) {
      leaves_[leaf_] = hash_.xxh3_64(kept_.data(), static_cast<std::size_t>(leaf_bytes_));
    }
    end_if_full();
  }

  // The next bytes are a block of their own, which need not be put anywhere.
  bool wants_block() const { return blocks_ && filled_ % kHashBlockBytes == 0; }
  void take_block(const std::byte* block) {
    filled_ += kHashBlockBytes;
    hash_block(block);
    end_if_full();
  }

 private:
  void begin() {
    filled_ = 0;
    leaf_bytes_ = std::min(kLeafBytes, left_);
    blocks_ = leaf_bytes_ == kLeafBytes;
  }

  void hash_block(const std::byte* block) {
    leaves_[leaf_] = hash_.leaf_block(state_.data(), static_cast<int>(filled_ / kHashBlockBytes) - 1, block);
  }

  void end_if_full() {
    if (filled_ < leaf_bytes_) return;
    ++leaf_;
    left_ -= leaf_bytes_;
    begin();
  }

  const HashVariant& hash_;
  const std::span<std::uint64_t> leaves_;
  std::size_t leaf_ = 0;
  std::int64_t left_;
  std::int64_t leaf_bytes_ = 0;
  std::int64_t filled_ = 0;
  bool blocks_ = false;  // of which each is hashed by itself: of whole leaves alone
  alignas(64) std::array<std::uint64_t, 8> state_;
  alignas(64) std::array<std::byte, kLeafBytes> kept_;
};

}  // namespace kvlink
