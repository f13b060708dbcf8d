// Rows copied and converted by the host, once per instruction set. See row_kernel.cpp; moves.cpp chooses.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvlink {

struct RowStrides {
  int64_t source;
  int64_t target;
};

// `count` rows of `bytes` each, any alignment. Variants that keep put what they read to `kept` as well, packed: the two
// are equal whoever writes the source meanwhile.
using MoveRows = void (*)(char* target, char* kept, const char* source, int64_t count, RowStrides strides,
                          int64_t bytes);

// `count` rows of `elements` each. Row i's scales are at [i * scale_step] of either table; null stands for 1.
using ConvertRows = void (*)(char* target, const char* source, int64_t count, RowStrides strides, int64_t elements,
                             const float* source_scales, const float* target_factors, int64_t scale_step);

struct RowKernel {
  MoveRows copy[2];           // [1] keeps
  MoveRows stream[2];         // past the caches, for what is not looked at soon; a fence must follow
  MoveRows strings;           // see carry.hpp; keeps nothing
  void (*fence)();
  ConvertRows convert[6][6];  // by Element of the source, of the target
};

const RowKernel& row_kernel_baseline();
#if defined(__x86_64__)
const RowKernel& row_kernel_avx2();
const RowKernel& row_kernel_avx512();
#endif

}  // namespace kvlink
