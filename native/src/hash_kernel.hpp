// XXH3-64 (seed 0), once per instruction set. See hash_kernel.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvlink {

// A leaf of 16 KiB is XXH3's in blocks, which need not lie together.
inline constexpr int64_t kHashBlockBytes = 1024;
inline constexpr int kLeafHashBlocks = 16;

uint64_t xxh3_64_baseline(const void* data, size_t bytes);
// Takes in block `number` of a whole leaf, in order from 0; the last returns the leaf's digest. `state` is 8 words,
// aligned to 64 bytes, which the first block sets.
uint64_t leaf_block_baseline(uint64_t* state, int number, const void* data);
#if defined(__x86_64__)
uint64_t xxh3_64_avx2(const void* data, size_t bytes);
uint64_t xxh3_64_avx512(const void* data, size_t bytes);
uint64_t leaf_block_avx2(uint64_t* state, int number, const void* data);
uint64_t leaf_block_avx512(uint64_t* state, int number, const void* data);
#endif

}  // namespace kvlink
