// What the kernels need of a language that g++, clang++, nvcc and NVRTC share. No header of the C library on a GPU.
#pragma once

#if defined(__CUDACC_RTC__)
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int8_t = signed char;
using int32_t = int;
using int64_t = long long;
#else
#include <stdint.h>
#endif

#if defined(__CUDACC__)
#define KVLINK_FN __host__ __device__ __forceinline__
#define KVLINK_INLINED KVLINK_FN
#define KVLINK_CONSTANT __constant__ const
#define KVLINK_SHARED __shared__
#define KVLINK_UNROLL _Pragma("unroll")
#define KVLINK_ROLLED _Pragma("unroll 1")
#else
#define KVLINK_FN inline
#define KVLINK_INLINED inline __attribute__((always_inline))  // what a loop must see through to be vectorised
#define KVLINK_CONSTANT static const
#define KVLINK_SHARED
#define KVLINK_UNROLL
#define KVLINK_ROLLED
#endif

// Where the bytes at an address are for this code. A test that stands in for a GPU has them elsewhere, and checks.
#ifndef KVLINK_MEMORY
#define KVLINK_MEMORY(address, bytes) (address)
#endif

// A file that is compiled once per instruction set names its own namespace: the linker keeps one copy of an inline
// function, and that must not be another instruction set's.
#ifndef KVLINK_KERNELS
#define KVLINK_KERNELS kernels
#endif

namespace kvlink::KVLINK_KERNELS {

KVLINK_INLINED float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

KVLINK_INLINED uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(uint32_t, value);
#endif
}

// One rounding, never part of a fused multiply-add: the host is compiled with -ffp-contract=off to the same end.
KVLINK_INLINED float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

KVLINK_INLINED uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(a) * b >> 64);
#endif
}

KVLINK_INLINED uint32_t multiply_high(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
#endif
}

// Division of n < 2^31 by an invariant (Granlund and Montgomery, PLDI 1994): a multiplication, an addition, a shift.
struct Divisor {
  uint32_t value;
  uint32_t factor;
  uint32_t shift;

  KVLINK_INLINED uint32_t split(uint32_t n, uint32_t* rest) const {
    const uint32_t quotient = (multiply_high(n, factor) + n) >> shift;
    *rest = n - quotient * value;
    return quotient;
  }
};

}  // namespace kvlink::KVLINK_KERNELS
