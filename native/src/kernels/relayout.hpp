// Moves and converts a plan's bytes: one source for GPUs (compiled by NVRTC, kernels.cu) and for the host, where it is
// the oracle that both the GPU's code and the host's own fast code are held to (host.hpp runs it).
//
// Work is cut into items: a few elements that lie contiguous on both sides and move with one load and one store. Items
// are numbered in wire order, so that an item's number gives its wire offset, and a digest's leaf is a range of items.
#pragma once

#include "leaf_hash.hpp"
#include "numbers.hpp"

namespace kvlink::KVLINK_KERNELS {

inline constexpr uint32_t kMaxDims = 8;
inline constexpr uint32_t kMaxItems = 1u << 31;  // of one job, excluded: what Divisor can split
inline constexpr uint32_t kThreads = 256;        // of one block

// One side's address or offset beside the other's.
struct Pair {
  int64_t source;
  int64_t target;
};

struct JobDim {
  int64_t source_stride;
  int64_t target_stride;
  Divisor count;
  uint32_t reserved;
};

// A plan's segment (docs/architecture.md, "Plan"), or a part of one with fewer than 2^31 items. Plain data: it is a
// kernel's argument, or lies in the device's memory beside others.
struct Job {
  const Pair* bases;            // [P] addresses
  const Pair* pieces;           // [N] offsets
  const float* source_scales;   // [P, scale_columns], or null for 1
  const float* target_factors;  // the same, inverse of the target's scales
  int64_t wire_begin;           // wire offset of item 0
  Pair start;                   // added to every address: where in the segment this part begins
  uint32_t items;
  uint32_t depth;               // of dims, outermost first
  uint32_t scale_columns;
  int32_t scale_dim;            // the dimension that walks the columns; -1 for none
  uint32_t scale_start;         // column of that dimension's first step
  Divisor piece_count;
  Divisor run_items;
  uint32_t first_item;          // what is done are `items` from here on; 0 for work of leaves
  JobDim dims[kMaxDims];
};

// --- an item --------------------------------------------------------------------------------------------------------

// 1 to 16 bytes as one machine word or vector of words.
template <int bytes>
struct alignas(bytes) Word {
  using Part = uint32_t;
  Part part[bytes / 4];
};
template <>
struct Word<2> {
  using Part = uint16_t;
  Part part[1];
};
template <>
struct Word<1> {
  using Part = uint8_t;
  Part part[1];
};

// The `k`-th stretch of `size` bytes, which is no longer than a part.
template <int size, int bytes>
KVLINK_FN uint32_t element(const Word<bytes>& word, int k) {
  constexpr int per_part = static_cast<int>(sizeof(word.part[0])) / size;
  if constexpr (per_part == 1) {
    return word.part[k];
  } else {
    return static_cast<uint32_t>(word.part[k / per_part]) >> k % per_part * 8 * size & ((1u << 8 * size) - 1u);
  }
}

// Sets them in ascending order; the first of a part clears the part's others.
template <int size, int bytes>
KVLINK_FN void set_element(Word<bytes>* word, int k, uint32_t value) {
  using Part = typename Word<bytes>::Part;
  constexpr int per_part = static_cast<int>(sizeof(Part)) / size;
  const uint32_t before = k % per_part == 0 ? 0u : word->part[k / per_part];
  word->part[k / per_part] = static_cast<Part>(before | value << k % per_part * 8 * size);
}

// Moved once and not looked at again: kept out of the near caches.
template <int bytes>
KVLINK_FN Word<bytes> load(int64_t address) {
  Word<bytes> word;
#if defined(__CUDA_ARCH__)
  if constexpr (bytes == 16) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.part[0]), "=r"(word.part[1]), "=r"(word.part[2]), "=r"(word.part[3])
                 : "l"(address));
    return word;
  }
#endif
  word = *reinterpret_cast<const Word<bytes>*>(KVLINK_MEMORY(address, bytes));
  return word;
}

template <int bytes>
KVLINK_FN void store(int64_t address, const Word<bytes>& word) {
#if defined(__CUDA_ARCH__)
  if constexpr (bytes == 16) {
    __stcs(reinterpret_cast<uint4*>(address), make_uint4(word.part[0], word.part[1], word.part[2], word.part[3]));
    return;
  }
#endif
  *reinterpret_cast<Word<bytes>*>(KVLINK_MEMORY(address, bytes)) = word;
}

// What happens to an item. `source_bytes` and `target_bytes` are powers of two up to 16.
template <int bytes>
struct Copy {
  static constexpr int source_bytes = bytes;
  static constexpr int target_bytes = bytes;
  static constexpr bool scaled = false;

  KVLINK_FN static Word<bytes> apply(const Word<bytes>& word, float, float) { return word; }
};

template <class Source, class Target, int elements>
struct Convert {
  static constexpr int source_size = sizeof(typename Source::Stored);
  static constexpr int target_size = sizeof(typename Target::Stored);
  static constexpr int source_bytes = elements * source_size;
  static constexpr int target_bytes = elements * target_size;
  static constexpr bool scaled = true;

  KVLINK_FN static float value(const Word<source_bytes>& word, int k, float source_scale, float target_factor) {
    return multiply(multiply(Source::decode(element<source_size>(word, k)), source_scale), target_factor);
  }

  KVLINK_FN static Word<target_bytes> apply(const Word<source_bytes>& word, float source_scale, float target_factor) {
    Word<target_bytes> out;
    if constexpr (elements == 1 || target_size == 4) {
      KVLINK_UNROLL for (int k = 0; k < elements; ++k) {
        set_element<target_size>(&out, k, Target::encode(value(word, k, source_scale, target_factor)));
      }
    } else {
      KVLINK_UNROLL for (int k = 0; k < elements; k += 2) {
        set_element<2 * target_size>(&out, k / 2,
                                     encode_pair<Target>(value(word, k, source_scale, target_factor),
                                                         value(word, k + 1, source_scale, target_factor)));
      }
    }
    return out;
  }
};

// --- where an item lies ---------------------------------------------------------------------------------------------

struct Place {
  Pair address;
  uint32_t scale;  // index into the scale tables
};

template <class Op>
KVLINK_FN Place place_of(const Job& job, uint32_t item) {
  uint32_t unit, rest = job.run_items.split(item, &unit);
  Place place{{job.start.source + static_cast<int64_t>(unit) * Op::source_bytes,
               job.start.target + static_cast<int64_t>(unit) * Op::target_bytes},
              job.scale_start};
  KVLINK_ROLLED for (uint32_t d = job.depth; d-- > 0;) {
    const JobDim& dim = job.dims[d];
    uint32_t step;
    rest = dim.count.split(rest, &step);
    place.address.source += step * dim.source_stride;
    place.address.target += step * dim.target_stride;
    if (Op::scaled && static_cast<int32_t>(d) == job.scale_dim) place.scale += step;
  }
  uint32_t piece;
  const uint32_t base = job.piece_count.split(rest, &piece);
  place.address.source += job.bases[base].source + job.pieces[piece].source;
  place.address.target += job.bases[base].target + job.pieces[piece].target;
  place.scale += base * job.scale_columns;
  return place;
}

template <class Op>
KVLINK_FN Word<Op::target_bytes> result_of(const Job& job, const Place& place, const Word<Op::source_bytes>& word) {
  if constexpr (Op::scaled) {
    const float source_scale = job.source_scales != nullptr ? job.source_scales[place.scale] : 1.0f;
    const float target_factor = job.target_factors != nullptr ? job.target_factors[place.scale] : 1.0f;
    return Op::apply(word, source_scale, target_factor);
  } else {
    return Op::apply(word, 1.0f, 1.0f);
  }
}

// --- kernels --------------------------------------------------------------------------------------------------------

// This thread's place in the grid.
struct Turn {
  uint32_t block;
  uint32_t blocks;
  uint32_t thread;
  uint32_t threads;
};

// All items of a job, `unroll` loads of a thread in flight before its first store.
template <class Op, int unroll>
KVLINK_FN void relayout(const Job& job, const Turn& turn) {
  const uint64_t tile = static_cast<uint64_t>(turn.threads) * unroll;
  for (uint64_t begin = turn.block * tile; begin < job.items; begin += turn.blocks * tile) {
    Word<Op::source_bytes> words[unroll];
    Place places[unroll];
    KVLINK_UNROLL for (int u = 0; u < unroll; ++u) {
      const uint64_t item = begin + static_cast<uint64_t>(u) * turn.threads + turn.thread;
      places[u].address.target = 0;
      if (item < job.items) {
        places[u] = place_of<Op>(job, job.first_item + static_cast<uint32_t>(item));
        words[u] = load<Op::source_bytes>(places[u].address.source);
      }
    }
    KVLINK_UNROLL for (int u = 0; u < unroll; ++u) {
      if (places[u].address.target != 0) {
        store<Op::target_bytes>(places[u].address.target, result_of<Op>(job, places[u], words[u]));
      }
    }
  }
}

// Runs a step on every thread of the block, then lets all of them see what it left in shared memory.
template <class Step>
KVLINK_FN void for_each_thread(const Turn& turn, const Step& step) {
#if defined(__CUDA_ARCH__)
  step(turn.thread);
  __syncthreads();
#else
  for (uint32_t thread = 0; thread < turn.threads; ++thread) step(thread);
#endif
}

// Leaves of the wire bytes of several jobs of one operation in wire order, none of which begins inside an item: moved
// (or only read) and hashed as they pass through shared memory, a block a leaf.
struct LeafWork {
  const Job* jobs;
  uint64_t* digests;    // [leaves]
  int64_t total_bytes;  // of the wire
  Pair shift;           // added to every address: where a packed side lies this time
  uint32_t job_count;
  uint32_t first_leaf;
  uint32_t leaves;
  uint32_t elements;    // of an item, in all jobs
};

// One leaf: wire bytes [begin, end), as thread `thread` of `threads`.
struct LeafTurn {
  int64_t begin;
  int64_t end;
  uint32_t thread;
  uint32_t threads;
};

template <class Op, bool moves>
KVLINK_FN void pass_items(const LeafWork& work, Leaf* leaf, const LeafTurn& turn) {
  constexpr int64_t step = Op::source_bytes;
  KVLINK_ROLLED for (uint32_t j = 0; j < work.job_count; ++j) {
    const Job& job = work.jobs[j];
    const int64_t low = turn.begin > job.wire_begin ? turn.begin : job.wire_begin;
    const int64_t job_end = job.wire_begin + job.items * step;
    const int64_t high = turn.end < job_end ? turn.end : job_end;
    KVLINK_ROLLED for (int64_t at = low + turn.thread * step; at < high; at += turn.threads * step) {
      Place place = place_of<Op>(job, static_cast<uint32_t>((at - job.wire_begin) / step));
      place.address.source += work.shift.source;
      place.address.target += work.shift.target;
      const Word<Op::source_bytes> word = load<Op::source_bytes>(place.address.source);
      *reinterpret_cast<Word<Op::source_bytes>*>(reinterpret_cast<char*>(leaf->words) + (at - turn.begin)) = word;
      if constexpr (moves) store<Op::target_bytes>(place.address.target, result_of<Op>(job, place, word));
    }
  }
}

// Copies, for OfElements.
struct NoType {
  using Stored = uint8_t;
};
template <class Source, class Target, int elements>
struct OfElements {
  using Op = Convert<Source, Target, elements>;
};
template <int elements>
struct OfElements<NoType, NoType, elements> {
  using Op = Copy<elements>;
};

// The most elements of an item: 16 bytes on either side.
template <class Source, class Target>
inline constexpr uint32_t kMostElements =
    16 / (sizeof(typename Source::Stored) > sizeof(typename Target::Stored) ? sizeof(typename Source::Stored)
                                                                             : sizeof(typename Target::Stored));

// The widths are told apart here, at run time, and not by kernels of their own: the hash would be in each of them.
template <class Source, class Target, bool moves, int elements = kMostElements<Source, Target>>
KVLINK_FN void pass_items_of(const LeafWork& work, Leaf* leaf, const LeafTurn& turn) {
  if (work.elements == elements) {
    pass_items<typename OfElements<Source, Target, elements>::Op, moves>(work, leaf, turn);
  } else if constexpr (elements > 1) {
    pass_items_of<Source, Target, moves, elements / 2>(work, leaf, turn);
  }
}

template <class Source, class Target, bool moves>
KVLINK_FN void hash_leaves(const LeafWork& work, Leaf* leaf, const Turn& turn) {
  KVLINK_ROLLED for (uint32_t i = turn.block; i < work.leaves; i += turn.blocks) {
    const int64_t begin = static_cast<int64_t>(work.first_leaf + i) * kLeafBytes;
    const int64_t end = begin + kLeafBytes < work.total_bytes ? begin + kLeafBytes : work.total_bytes;
    const uint32_t bytes = static_cast<uint32_t>(end - begin);
    for_each_thread(turn, [&](uint32_t thread) {
      pass_items_of<Source, Target, moves>(work, leaf, {begin, end, thread, turn.threads});
    });
    if (bytes > 240) {
      for_each_thread(turn, [&](uint32_t thread) { sum_chunks(leaf, bytes, thread, turn.threads); });
      for_each_thread(turn, [&](uint32_t thread) {
        if (thread < kLanes) chain_chunks(leaf, bytes, thread);
      });
    }
    for_each_thread(turn, [&](uint32_t thread) {
      if (thread == 0) work.digests[i] = bytes > 240 ? merge_lanes(leaf, bytes) : hash_short(leaf->words, bytes);
    });
  }
}

}  // namespace kvlink::KVLINK_KERNELS
