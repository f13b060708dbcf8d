// The kernels of one conversion, or of plain copies: what NVRTC compiles for the device found.
//
// Defined by the caller for a conversion: KVLINK_SOURCE and KVLINK_TARGET, types of numbers.hpp. The number of a mover
// is how many elements (bytes, in copies) an item has; the host picks the largest that every address is aligned for.
#include "relayout.hpp"

namespace {

using namespace kvlink::KVLINK_KERNELS;

#if defined(KVLINK_SOURCE)
using Source = KVLINK_SOURCE;
using Target = KVLINK_TARGET;
#else
using Source = NoType;
using Target = NoType;
#endif

constexpr int kUnroll = 4;

__device__ Turn turn_of_thread() { return {blockIdx.x, gridDim.x, threadIdx.x, blockDim.x}; }

template <int elements>
__device__ void move_items(const Job& job) {
  if constexpr (elements <= kMostElements<Source, Target>) {
    relayout<typename OfElements<Source, Target, elements>::Op, kUnroll>(job, turn_of_thread());
  }
}

template <bool moves>
__device__ void hash_in_shared_memory(const LeafWork& work) {
  __shared__ Leaf leaf;
  hash_leaves<Source, Target, moves>(work, &leaf, turn_of_thread());
}

}  // namespace

#define KVLINK_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)

// A module tells which conversion it holds by the name of a symbol: kvlink_types_Source_to_Target.
#if defined(KVLINK_SOURCE)
#define KVLINK_JOIN(source, target) kvlink_types_##source##_to_##target
#define KVLINK_NAME(source, target) KVLINK_JOIN(source, target)
extern "C" __device__ unsigned char KVLINK_NAME(KVLINK_SOURCE, KVLINK_TARGET) = 1;
#endif

KVLINK_KERNEL kvlink_move_1(const __grid_constant__ Job job) { move_items<1>(job); }
KVLINK_KERNEL kvlink_move_2(const __grid_constant__ Job job) { move_items<2>(job); }
KVLINK_KERNEL kvlink_move_4(const __grid_constant__ Job job) { move_items<4>(job); }
KVLINK_KERNEL kvlink_move_8(const __grid_constant__ Job job) { move_items<8>(job); }
KVLINK_KERNEL kvlink_move_16(const __grid_constant__ Job job) { move_items<16>(job); }

KVLINK_KERNEL kvlink_move_and_digest(const __grid_constant__ LeafWork work) { hash_in_shared_memory<true>(work); }
// Knows no conversion: the wire carries the source's bytes.
#if !defined(KVLINK_SOURCE)
KVLINK_KERNEL kvlink_digest(const __grid_constant__ LeafWork work) { hash_in_shared_memory<false>(work); }
#endif
