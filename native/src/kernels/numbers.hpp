// The six element types as integers and back: bit-exact and the same on every machine.
//
//   decode(stored)  its value as float32; exact for every type.
//   encode(value)   the nearest stored value, ties to even. fp8 and int8 saturate, infinities too; float16 and bfloat16
//                   overflow to infinity, as IEEE has it.
//   NaN             one pattern a type, sign and payload dropped: float16 7e00, bfloat16 7fc0, float32 7fc00000, both
//                   fp8 7f (what the GPUs' own conversion gives). int8 has none and stores 0.
//
// Straight-line code on 32-bit integers, so that compilers vectorise it. Float32 arithmetic is the default of IEEE 754:
// nearest even, subnormals kept (a thread that may have been set otherwise is set right by the caller).
#pragma once

#include "portable.hpp"

namespace kvlink::KVLINK_KERNELS {

inline constexpr uint32_t kInfinity = 0x7f800000u;

KVLINK_INLINED uint32_t magnitude(uint32_t bits) { return bits & 0x7fffffffu; }
KVLINK_INLINED uint32_t choose(bool condition, uint32_t yes, uint32_t no) { return condition ? yes : no; }
KVLINK_INLINED uint32_t at_most(uint32_t value, uint32_t limit) { return value < limit ? value : limit; }

// Drops `dropped` mantissa bits of a float32 pattern, to nearest, ties to even; a carry goes into the exponent.
template <int dropped>
KVLINK_INLINED uint32_t round_off(uint32_t bits) {
  return (bits + ((1u << (dropped - 1)) - 1u) + ((bits >> dropped) & 1u)) >> dropped;
}

// A magnitude below 2^24 steps of 2^step, as a number of steps: adding the float32 whose unit in the last place is one
// step rounds to it, to nearest even.
template <int step>
KVLINK_INLINED uint32_t steps_of(uint32_t bits) {
  constexpr uint32_t anchor = static_cast<uint32_t>(step + 23 + 127) << 23;
  return bits_of(float_of(bits) + float_of(anchor)) - anchor;
}

// The small floats differ in widths only: `kMantissa` bits, exponent bias `kBias`, and the largest float32 that is
// encoded before saturation or overflow is decided.
struct Float16 {
  using Stored = uint16_t;

  KVLINK_INLINED static float decode(uint32_t stored) {
    const uint32_t a = stored & 0x7fffu;
    const uint32_t normal = (a << 13) + choose(a < 0x7c00u, 112u << 23, 224u << 23);
    const uint32_t subnormal = bits_of(multiply(static_cast<float>(static_cast<int32_t>(a)), 0x1p-24f));
    return float_of(choose(a < 0x400u, subnormal, normal) | (stored & 0x8000u) << 16);
  }

  KVLINK_INLINED static uint32_t encode(float value) {
    const uint32_t bits = bits_of(value), a = magnitude(bits), sign = bits >> 16 & 0x8000u;
    // From 65520 on: infinity. The bound keeps the sum inside the pattern's bits.
    const uint32_t normal = round_off<13>(at_most(a, 0x47800000u)) - (112u << 10);
    const uint32_t finite = choose(a < 0x38800000u, steps_of<-24>(a), normal) | sign;
    return choose(a > kInfinity, 0x7e00u, finite);
  }
};

struct BFloat16 {
  using Stored = uint16_t;

  KVLINK_INLINED static float decode(uint32_t stored) { return float_of(stored << 16); }

  KVLINK_INLINED static uint32_t encode(float value) {
    const uint32_t bits = bits_of(value);
    return choose(magnitude(bits) > kInfinity, 0x7fc0u, round_off<16>(bits));
  }
};

struct Float32 {
  using Stored = uint32_t;

  KVLINK_INLINED static float decode(uint32_t stored) { return float_of(stored); }

  KVLINK_INLINED static uint32_t encode(float value) {
    const uint32_t bits = bits_of(value);
    return choose(magnitude(bits) > kInfinity, 0x7fc00000u, bits);
  }
};

// e4m3fn: no infinities, largest 448.
struct Float8E4M3 {
  using Stored = uint8_t;

  KVLINK_INLINED static float decode(uint32_t stored) {
    const uint32_t a = stored & 0x7fu;
    const uint32_t subnormal = bits_of(multiply(static_cast<float>(static_cast<int32_t>(a)), 0x1p-9f));
    const uint32_t finite = choose(a < 8u, subnormal, (a << 20) + (120u << 23)) | (stored & 0x80u) << 24;
    return float_of(choose(a == 0x7fu, 0x7fc00000u, finite));
  }

  KVLINK_INLINED static uint32_t encode(float value) {
    const uint32_t bits = bits_of(value), a = magnitude(bits), sign = bits >> 24 & 0x80u;
    const uint32_t normal = round_off<20>(at_most(a, 0x43e00000u)) - (120u << 3);
    const uint32_t finite = choose(a < 0x3c800000u, steps_of<-9>(a), normal) | sign;
    return choose(a > kInfinity, 0x7fu, finite);
  }
};

// e5m2: float16 with eight mantissa bits fewer; largest 57344.
struct Float8E5M2 {
  using Stored = uint8_t;

  KVLINK_INLINED static float decode(uint32_t stored) { return Float16::decode(stored << 8); }

  KVLINK_INLINED static uint32_t encode(float value) {
    const uint32_t bits = bits_of(value), a = magnitude(bits), sign = bits >> 24 & 0x80u;
    const uint32_t normal = round_off<21>(at_most(a, 0x47600000u)) - (112u << 2);
    const uint32_t finite = choose(a < 0x38800000u, steps_of<-16>(a), normal) | sign;
    return choose(a > kInfinity, 0x7fu, finite);
  }
};

struct Int8 {
  using Stored = uint8_t;

  KVLINK_INLINED static float decode(uint32_t stored) {
    return static_cast<float>(static_cast<int32_t>(stored << 24) >> 24);
  }

  KVLINK_INLINED static uint32_t encode(float value) {
    const uint32_t bits = bits_of(value), a = magnitude(bits);
    const uint32_t steps = steps_of<0>(at_most(a, 0x43000000u));  // 128 at most
    const uint32_t positive = at_most(steps, 127u), negative = (0u - steps) & 0xffu;
    return choose(a > kInfinity, 0u, choose(bits >> 31 != 0u, negative, positive));
  }
};

// One element: value = decode(stored) * source_scale, then encode(value * target_factor); a factor is the inverse of
// the target's scale, computed once in float32. Without scales both are 1, which changes no bit.
template <class Source, class Target>
KVLINK_INLINED uint32_t convert_one(uint32_t stored, float source_scale, float target_factor) {
  return Target::encode(multiply(multiply(Source::decode(stored), source_scale), target_factor));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define KVLINK_HARDWARE_FP8 1
#endif

// Two neighbours at once, the first in the low bits; GPUs with an instruction for it use it (one instruction for a pair
// against some twenty). It saturates and has the same NaN.
template <class Target>
KVLINK_INLINED uint32_t encode_pair(float first, float second) {
  return Target::encode(first) | Target::encode(second) << 8 * sizeof(typename Target::Stored);
}

#if defined(KVLINK_HARDWARE_FP8)
template <>
KVLINK_INLINED uint32_t encode_pair<Float8E4M3>(float first, float second) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}

template <>
KVLINK_INLINED uint32_t encode_pair<Float8E5M2>(float first, float second) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}
#endif

}  // namespace kvlink::KVLINK_KERNELS
