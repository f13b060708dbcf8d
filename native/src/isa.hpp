// Which of the instruction sets that files are compiled for this CPU runs: baseline, AVX2, AVX-512 (F, BW, VL, DQ).
#pragma once

#include <cstddef>

namespace kvlink {

// How many of the variants to skip in a list of all, fastest first.
inline std::size_t isas_beyond_this_cpu() {
#if defined(__x86_64__)
  __builtin_cpu_init();  // idempotent; these ask the operating system's consent too
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512) return 0;
  return __builtin_cpu_supports("avx2") ? 1 : 2;
#else
  return 0;
#endif
}

}  // namespace kvlink
