// XXH3-64 (seed 0) of one digest leaf that lies in a block's shared memory, by all of the block's threads.
//
// The format is that of https://github.com/Cyan4973/xxHash (doc/xxhash_spec.md, "XXH3"). Long inputs are chunks of 16
// stripes of eight 8-byte lanes. Within a chunk a lane only adds, and addition commutes: so each (chunk, lane) is
// summed by a thread of its own, and only the scrambles between chunks are in order, by eight threads.
#pragma once

#include "portable.hpp"

namespace kvlink::KVLINK_KERNELS {

inline constexpr uint32_t kLeafBytes = 16 * 1024;  // docs/architecture.md, "Digest"
inline constexpr uint32_t kLanes = 8;
inline constexpr uint32_t kStripeBytes = 64;
inline constexpr uint32_t kStripesPerChunk = 16;
inline constexpr uint32_t kChunkBytes = kStripeBytes * kStripesPerChunk;
inline constexpr uint32_t kSecretBytes = 192;

inline constexpr uint32_t kPrime32_1 = 0x9e3779b1u;
inline constexpr uint64_t kPrime64_1 = 0x9e3779b185ebca87u;
inline constexpr uint64_t kPrime64_2 = 0xc2b2ae3d27d4eb4fu;
inline constexpr uint64_t kPrime64_3 = 0x165667b19e3779f9u;

KVLINK_CONSTANT uint64_t kSecret[kSecretBytes / 8] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
KVLINK_CONSTANT uint64_t kLaneStart[kLanes] = {0xc2b2ae3d, kPrime64_1, kPrime64_2,         kPrime64_3,
                                               0x85ebca77c2b2ae63, 0x85ebca77, 0x27d4eb2f165667c5, kPrime32_1};

// What a block shares: the leaf, with a word behind it that `word_at` may look at, and a sum for each (chunk, lane).
struct alignas(16) Leaf {
  uint64_t words[kLeafBytes / 8 + 2];
  uint64_t sums[kLeafBytes / kChunkBytes][kLanes];
};

// The 8 bytes at any offset, little-endian.
KVLINK_FN uint64_t word_at(const uint64_t* words, uint32_t offset) {
  const uint64_t* at = words + offset / 8;
  const uint32_t shift = offset % 8 * 8;
  return shift == 0 ? at[0] : at[0] >> shift | at[1] << (64 - shift);
}

// The last 8 bytes of the secret are never asked for at an odd offset, so nothing is read past it.
KVLINK_FN uint64_t secret_at(uint32_t offset) { return word_at(kSecret, offset); }

KVLINK_FN uint64_t fold(uint64_t a, uint64_t b) { return a * b ^ multiply_high(a, b); }

KVLINK_FN uint64_t avalanche(uint64_t h) {
  h ^= h >> 37;
  h *= 0x165667919e3779f9u;
  return h ^ h >> 32;
}

KVLINK_FN uint64_t strong_avalanche(uint64_t h) {
  h ^= h >> 33;
  h *= kPrime64_2;
  h ^= h >> 29;
  h *= kPrime64_3;
  return h ^ h >> 32;
}

KVLINK_FN uint64_t rotated(uint64_t h, int by) { return h << by | h >> (64 - by); }

KVLINK_FN uint64_t bytes_swapped(uint64_t x) {
  x = (x & 0x00ff00ff00ff00ffu) << 8 | (x >> 8 & 0x00ff00ff00ff00ffu);
  x = (x & 0x0000ffff0000ffffu) << 16 | (x >> 16 & 0x0000ffff0000ffffu);
  return x << 32 | x >> 32;
}

// --- up to 240 bytes: by one thread ---------------------------------------------------------------------------------

KVLINK_FN uint64_t hash_to_3(const uint64_t* words, uint32_t bytes) {
  const uint64_t in = words[0];
  const uint64_t first = in & 0xff, middle = in >> 8 * (bytes / 2) & 0xff, last = in >> 8 * (bytes - 1) & 0xff;
  const uint64_t mixed = first << 16 | middle << 24 | last | static_cast<uint64_t>(bytes) << 8;
  return strong_avalanche(mixed ^ ((secret_at(0) ^ secret_at(0) >> 32) & 0xffffffffu));
}

KVLINK_FN uint64_t hash_4_to_8(const uint64_t* words, uint32_t bytes) {
  const uint64_t first = words[0] & 0xffffffffu, last = word_at(words, bytes - 4) & 0xffffffffu;
  uint64_t h = (last + (first << 32)) ^ secret_at(8) ^ secret_at(16);
  h ^= rotated(h, 49) ^ rotated(h, 24);
  h *= 0x9fb21c651e98df25u;
  h ^= (h >> 35) + bytes;
  h *= 0x9fb21c651e98df25u;
  return h ^ h >> 28;
}

KVLINK_FN uint64_t hash_9_to_16(const uint64_t* words, uint32_t bytes) {
  const uint64_t low = words[0] ^ secret_at(24) ^ secret_at(32);
  const uint64_t high = word_at(words, bytes - 8) ^ secret_at(40) ^ secret_at(48);
  return avalanche(bytes + bytes_swapped(low) + high + fold(low, high));
}

KVLINK_FN uint64_t mixed_16(const uint64_t* words, uint32_t offset, uint32_t secret) {
  return fold(word_at(words, offset) ^ secret_at(secret), word_at(words, offset + 8) ^ secret_at(secret + 8));
}

KVLINK_FN uint64_t hash_17_to_128(const uint64_t* words, uint32_t bytes) {
  uint64_t h = bytes * kPrime64_1;
  KVLINK_ROLLED for (uint32_t i = 0; i <= (bytes - 1) / 32; ++i) {
    h += mixed_16(words, 16 * i, 32 * i) + mixed_16(words, bytes - 16 * (i + 1), 32 * i + 16);
  }
  return avalanche(h);
}

KVLINK_FN uint64_t hash_129_to_240(const uint64_t* words, uint32_t bytes) {
  uint64_t h = bytes * kPrime64_1;
  KVLINK_ROLLED for (uint32_t i = 0; i < 8; ++i) h += mixed_16(words, 16 * i, 16 * i);
  h = avalanche(h);
  KVLINK_ROLLED for (uint32_t i = 8; i < bytes / 16; ++i) h += mixed_16(words, 16 * i, 16 * (i - 8) + 3);
  return avalanche(h + mixed_16(words, bytes - 16, 136 - 17));
}

KVLINK_FN uint64_t hash_short(const uint64_t* words, uint32_t bytes) {
  if (bytes > 128) return hash_129_to_240(words, bytes);
  if (bytes > 16) return hash_17_to_128(words, bytes);
  if (bytes > 8) return hash_9_to_16(words, bytes);
  if (bytes > 3) return hash_4_to_8(words, bytes);
  return hash_to_3(words, bytes);  // no leaf is empty
}

// --- longer: three steps, a barrier between them --------------------------------------------------------------------

// What one stripe adds to a lane. The data itself goes to the neighbour.
KVLINK_FN uint64_t stripe_term(const uint64_t* words, uint32_t offset, uint32_t secret, uint32_t lane) {
  const uint64_t key = word_at(words, offset + 8 * lane) ^ secret_at(secret + 8 * lane);
  return (key & 0xffffffffu) * (key >> 32) + word_at(words, offset + 8 * (lane ^ 1));
}

KVLINK_FN uint32_t whole_chunks(uint32_t bytes) { return (bytes - 1) / kChunkBytes; }

KVLINK_FN void sum_chunks(Leaf* leaf, uint32_t bytes, uint32_t thread, uint32_t threads) {
  const uint32_t whole = whole_chunks(bytes);
  KVLINK_ROLLED for (uint32_t i = thread; i < (whole + 1) * kLanes; i += threads) {
    const uint32_t chunk = i / kLanes, lane = i % kLanes;
    const uint32_t stripes = chunk < whole ? kStripesPerChunk : (bytes - 1 - whole * kChunkBytes) / kStripeBytes;
    uint64_t sum = 0;
    KVLINK_ROLLED for (uint32_t s = 0; s < stripes; ++s) {
      sum += stripe_term(leaf->words, chunk * kChunkBytes + s * kStripeBytes, 8 * s, lane);
    }
    leaf->sums[chunk][lane] = sum;
  }
}

KVLINK_FN void chain_chunks(Leaf* leaf, uint32_t bytes, uint32_t lane) {
  const uint32_t whole = whole_chunks(bytes);
  uint64_t acc = kLaneStart[lane];
  KVLINK_ROLLED for (uint32_t chunk = 0; chunk < whole; ++chunk) {
    acc += leaf->sums[chunk][lane];
    acc ^= acc >> 47;
    acc ^= secret_at(kSecretBytes - kStripeBytes + 8 * lane);
    acc *= kPrime32_1;
  }
  acc += leaf->sums[whole][lane];
  acc += stripe_term(leaf->words, bytes - kStripeBytes, kSecretBytes - kStripeBytes - 7, lane);
  leaf->sums[0][lane] = acc;
}

KVLINK_FN uint64_t merge_lanes(const Leaf* leaf, uint32_t bytes) {
  uint64_t h = bytes * kPrime64_1;
  KVLINK_ROLLED for (uint32_t i = 0; i < kLanes; i += 2) {
    h += fold(leaf->sums[0][i] ^ secret_at(11 + 8 * i), leaf->sums[0][i + 1] ^ secret_at(19 + 8 * i));
  }
  return avalanche(h);
}

}  // namespace kvlink::KVLINK_KERNELS
