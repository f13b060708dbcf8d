// Compiled once per instruction set, with its flags and KVLINK_HASH_ISA. Include no C++ library header here: the linker
// keeps one copy of an inline function, and if it were this file's, the whole library would need this instruction set.
#define XXH_INLINE_ALL
#include "xxhash.h"

#include "hash_kernel.hpp"

#define KVLINK_JOIN2(a, b) a##b
#define KVLINK_JOIN(a, b) KVLINK_JOIN2(a, b)

namespace kvlink {

uint64_t KVLINK_JOIN(xxh3_64_, KVLINK_HASH_ISA)(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

// What XXH3's own loop does with 16 KiB, cut where it turns from block to block.
uint64_t KVLINK_JOIN(leaf_block_, KVLINK_HASH_ISA)(uint64_t* state, int number, const void* data) {
  const auto* block = static_cast<const xxh_u8*>(data);
  const xxh_u8* const secret = XXH3_kSecret;
  const size_t stripes = kHashBlockBytes / XXH_STRIPE_LEN;
  alignas(64) static constexpr xxh_u64 init[XXH_ACC_NB] = XXH3_INIT_ACC;
  alignas(64) xxh_u64 acc[XXH_ACC_NB];  // of our own, so that it stays in registers
  memcpy(acc, number == 0 ? init : state, sizeof acc);
  if (number + 1 < kLeafHashBlocks) {
    XXH3_accumulate(acc, block, secret, stripes);
    XXH3_scrambleAcc(acc, secret + XXH_SECRET_DEFAULT_SIZE - XXH_STRIPE_LEN);
    memcpy(state, acc, sizeof acc);
    return 0;
  }
  XXH3_accumulate(acc, block, secret, stripes - 1);
  XXH3_accumulate_512(acc, block + kHashBlockBytes - XXH_STRIPE_LEN,
                      secret + XXH_SECRET_DEFAULT_SIZE - XXH_STRIPE_LEN - XXH_SECRET_LASTACC_START);
  return XXH3_finalizeLong_64b(acc, secret, kHashBlockBytes * kLeafHashBlocks);
}

}  // namespace kvlink
