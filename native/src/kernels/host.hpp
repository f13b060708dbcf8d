// Runs the kernels on the host, thread after thread: the oracle, and what stands in for a GPU in tests. Slow.
#pragma once

#include <memory>
#include <stdexcept>

#include "../element.hpp"
#include "relayout.hpp"

namespace kvlink::kernels {

struct Conversion {
  Element source;
  Element target;
};

template <class Work>
void for_each_turn(uint32_t blocks, uint32_t threads, const Work& work) {
  for (uint32_t block = 0; block < blocks; ++block) {
    for (uint32_t thread = 0; thread < threads; ++thread) work(Turn{block, blocks, thread, threads});
  }
}

// Calls work.template operator()<Source, Target>() for the types of `conversion`; null for copies.
template <class Source, class Work>
void with_target(Element target, const Work& work) {
  switch (target) {
    case Element::float16: return work.template operator()<Source, Float16>();
    case Element::bfloat16: return work.template operator()<Source, BFloat16>();
    case Element::float32: return work.template operator()<Source, Float32>();
    case Element::float8_e4m3: return work.template operator()<Source, Float8E4M3>();
    case Element::float8_e5m2: return work.template operator()<Source, Float8E5M2>();
    case Element::int8: return work.template operator()<Source, Int8>();
  }
}

template <class Work>
void with_types(const Conversion* conversion, const Work& work) {
  if (conversion == nullptr) return work.template operator()<NoType, NoType>();
  switch (conversion->source) {
    case Element::float16: return with_target<Float16>(conversion->target, work);
    case Element::bfloat16: return with_target<BFloat16>(conversion->target, work);
    case Element::float32: return with_target<Float32>(conversion->target, work);
    case Element::float8_e4m3: return with_target<Float8E4M3>(conversion->target, work);
    case Element::float8_e5m2: return with_target<Float8E5M2>(conversion->target, work);
    case Element::int8: return with_target<Int8>(conversion->target, work);
  }
}

// Calls work.template operator()<Op>() for items of `elements`.
template <class Source, class Target, int most = static_cast<int>(kMostElements<Source, Target>), class Work>
void with_elements(int elements, const Work& work) {
  if (elements == most) {
    work.template operator()<typename OfElements<Source, Target, most>::Op>();
  } else if constexpr (most > 1) {
    with_elements<Source, Target, most / 2>(elements, work);
  } else {
    throw std::invalid_argument("no kernel has items of so many elements");
  }
}

// The result must not depend on the grid.
inline void run_on_host(const Conversion* conversion, int elements, const Job& job, uint32_t blocks, uint32_t threads) {
  with_types(conversion, [&]<class Source, class Target>() {
    with_elements<Source, Target>(elements, [&]<class Op>() {
      for_each_turn(blocks, threads, [&](const Turn& turn) { relayout<Op, 2>(job, turn); });
    });
  });
}

template <bool moves>
void digest_on_host(const Conversion* conversion, const LeafWork& work, uint32_t blocks, uint32_t threads) {
  const auto leaf = std::make_unique<Leaf>();
  with_types(conversion, [&]<class Source, class Target>() {
    for (uint32_t block = 0; block < blocks; ++block) {
      hash_leaves<Source, Target, moves>(work, leaf.get(), Turn{block, blocks, 0, threads});
    }
  });
}

}  // namespace kvlink::kernels
