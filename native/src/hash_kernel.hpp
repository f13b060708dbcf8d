// XXH3-64 (seed 0), once per instruction set. See hash_kernel.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvlink {

uint64_t xxh3_64_baseline(const void* data, size_t bytes);
#if defined(__x86_64__)
uint64_t xxh3_64_avx2(const void* data, size_t bytes);
uint64_t xxh3_64_avx512(const void* data, size_t bytes);
#endif

}  // namespace kvlink
