// Rows copied and converted by the host, once per instruction set. See row_kernel.cpp; moves.cpp chooses.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvlink {

struct RowStrides {
  int64_t source;
  int64_t target;
};

// A plan's walk reads this far behind what it prefetches: a few lines more than memory takes to answer. The hardware's
// own prefetch stops at every page of 4 KiB.
inline constexpr int64_t kAheadBytes = 2048;

// `count` rows of `bytes` each. Any alignment. `ahead` is how far from a row its like will be read some kAheadBytes
// later, when these rows are done; 0 if that is not known.
using CopyRows = void (*)(char* target, const char* source, int64_t count, RowStrides strides, int64_t bytes,
                          int64_t ahead);

// `count` rows of `elements` each. Row i's scales are at [i * scale_step] of either table; null stands for 1.
using ConvertRows = void (*)(char* target, const char* source, int64_t count, RowStrides strides, int64_t elements,
                             const float* source_scales, const float* target_factors, int64_t scale_step);

struct RowKernel {
  CopyRows copy;
  CopyRows stream;            // past the caches, for what is not looked at soon; a fence must follow
  void (*fence)();
  ConvertRows convert[6][6];  // by Element of the source, of the target
};

const RowKernel& row_kernel_baseline();
#if defined(__x86_64__)
const RowKernel& row_kernel_avx2();
const RowKernel& row_kernel_avx512();
#endif

}  // namespace kvlink
