// Compiled once per instruction set, with its flags and KVLINK_ISA. Include no C++ library header here: the linker
// keeps one copy of an inline function, and if it were this file's, the whole library would need this instruction set.
#define KVLINK_JOIN2(a, b) a##b
#define KVLINK_JOIN(a, b) KVLINK_JOIN2(a, b)
#define KVLINK_KERNELS KVLINK_JOIN(kernels_, KVLINK_ISA)

#include "row_kernel.hpp"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/numbers.hpp"

namespace kvlink {
namespace {

using namespace KVLINK_KERNELS;

constexpr int64_t kLineBytes = 64;

// --- copies ---------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
using Vector = __m512i;
KVLINK_INLINED Vector load_vector(const char* p) { return _mm512_loadu_si512(p); }
KVLINK_INLINED void store_vector(char* p, Vector v) { _mm512_storeu_si512(p, v); }
KVLINK_INLINED void stream_vector(char* p, Vector v) { _mm512_stream_si512(reinterpret_cast<Vector*>(p), v); }
#elif defined(__AVX2__)
using Vector = __m256i;
KVLINK_INLINED Vector load_vector(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const Vector*>(p)); }
KVLINK_INLINED void store_vector(char* p, Vector v) { _mm256_storeu_si256(reinterpret_cast<Vector*>(p), v); }
KVLINK_INLINED void stream_vector(char* p, Vector v) { _mm256_stream_si256(reinterpret_cast<Vector*>(p), v); }
#elif defined(__x86_64__)
using Vector = __m128i;
KVLINK_INLINED Vector load_vector(const char* p) { return _mm_loadu_si128(reinterpret_cast<const Vector*>(p)); }
KVLINK_INLINED void store_vector(char* p, Vector v) { _mm_storeu_si128(reinterpret_cast<Vector*>(p), v); }
KVLINK_INLINED void stream_vector(char* p, Vector v) { _mm_stream_si128(reinterpret_cast<Vector*>(p), v); }
#endif

#if defined(__x86_64__)

constexpr int64_t kVectorBytes = sizeof(Vector);

// A short row costs less inline than a call does: whole vectors, the last of which may overlap the one before it.
KVLINK_INLINED void copy_row(char* target, const char* source, int64_t bytes) {
  if (bytes < kVectorBytes) {
    memcpy(target, source, static_cast<size_t>(bytes));
    return;
  }
  const Vector last = load_vector(source + bytes - kVectorBytes);
  for (int64_t at = 0; at < bytes - kVectorBytes; at += kVectorBytes) {
    store_vector(target + at, load_vector(source + at));
  }
  store_vector(target + bytes - kVectorBytes, last);
}

KVLINK_INLINED void copy_string(char* target, const char* source, int64_t bytes) {
  asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(bytes) : : "memory");
}
void fence() { _mm_sfence(); }

#else

constexpr int64_t kVectorBytes = kLineBytes;
struct Vector {
  char bytes[kVectorBytes];
};
KVLINK_INLINED Vector load_vector(const char* p) {
  Vector v;
  memcpy(&v, p, sizeof v);
  return v;
}
KVLINK_INLINED void store_vector(char* p, Vector v) { memcpy(p, &v, sizeof v); }
KVLINK_INLINED void stream_vector(char* p, Vector v) { store_vector(p, v); }
KVLINK_INLINED void copy_row(char* target, const char* source, int64_t bytes) {
  memcpy(target, source, static_cast<size_t>(bytes));
}
KVLINK_INLINED void copy_string(char* target, const char* source, int64_t bytes) { copy_row(target, source, bytes); }
void fence() {}

#endif

// The compiler may not read the source a second time: what is there may have changed.
KVLINK_INLINED void read_once() { asm volatile("" ::: "memory"); }

template <bool kKeep>
KVLINK_INLINED void copy_edge(char* target, char* kept, const char* source, int64_t bytes) {
  if (kKeep) {
    copy_row(kept, source, bytes);
    read_once();
    copy_row(target, kept, bytes);
  } else {
    copy_row(target, source, bytes);
  }
}

// Whole lines are streamed (a line streamed in part costs a read of the rest); what lies before and after them is
// stored as usual. Streaming stores fault unless aligned, so the alignment is this row's own.
template <bool kStream, bool kKeep>
KVLINK_INLINED void move_row(char* target, char* kept, const char* source, int64_t bytes) {
  const int64_t head = kStream ? -reinterpret_cast<intptr_t>(target) & (kLineBytes - 1) : 0;
  if (bytes < head + kLineBytes) {
    copy_edge<kKeep>(target, kept, source, bytes);
    return;
  }
  if (head != 0) copy_edge<kKeep>(target, kept, source, head);
  int64_t at = head;
  for (; at + kLineBytes <= bytes; at += kLineBytes) {
    KVLINK_UNROLL for (int64_t v = 0; v < kLineBytes; v += kVectorBytes) {
      const Vector vector = load_vector(source + at + v);
      if (kKeep) {
        read_once();
        store_vector(kept + at + v, vector);
      }
      if (kStream) {
        stream_vector(target + at + v, vector);
      } else {
        store_vector(target + at + v, vector);
      }
    }
  }
  if (at < bytes) copy_edge<kKeep>(target + at, kKeep ? kept + at : nullptr, source + at, bytes - at);
}

template <bool kStream, bool kKeep>
void move_rows(char* target, char* kept, const char* source, int64_t count, RowStrides strides, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) {
    move_row<kStream, kKeep>(target + i * strides.target, kept, source + i * strides.source, bytes);
    if (kKeep) kept += bytes;
  }
}

void string_rows(char* target, char*, const char* source, int64_t count, RowStrides strides, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) copy_string(target + i * strides.target, source + i * strides.source, bytes);
}

// --- conversions ----------------------------------------------------------------------------------------------------

// Elements at any address: caches are aligned, a caller's view need not be.
template <class Type>
struct __attribute__((packed, may_alias)) Element {
  typename Type::Stored stored;
};

template <class Source, class Target>
void convert_rows(char* target, const char* source, int64_t count, RowStrides strides, int64_t elements,
                  const float* source_scales, const float* target_factors, int64_t scale_step) {
  for (int64_t row = 0; row < count; ++row) {
    const float source_scale = source_scales != nullptr ? source_scales[row * scale_step] : 1.0f;
    const float target_factor = target_factors != nullptr ? target_factors[row * scale_step] : 1.0f;
    // Rows of one plan do not overlap across its sides, so the loop is free of dependences.
    const auto* __restrict in = reinterpret_cast<const Element<Source>*>(source + row * strides.source);
    auto* __restrict out = reinterpret_cast<Element<Target>*>(target + row * strides.target);
    for (int64_t i = 0; i < elements; ++i) {
      out[i].stored = static_cast<typename Target::Stored>(
          convert_one<Source, Target>(in[i].stored, source_scale, target_factor));
    }
  }
}

#define KVLINK_TO_ALL(Source)                                                                      \
  {convert_rows<Source, Float16>,    convert_rows<Source, BFloat16>,   convert_rows<Source, Float32>, \
   convert_rows<Source, Float8E4M3>, convert_rows<Source, Float8E5M2>, convert_rows<Source, Int8>}

const RowKernel kernel = {
    {move_rows<false, false>, move_rows<false, true>},
    {move_rows<true, false>, move_rows<true, true>},
    string_rows,
    fence,
    {KVLINK_TO_ALL(Float16), KVLINK_TO_ALL(BFloat16), KVLINK_TO_ALL(Float32), KVLINK_TO_ALL(Float8E4M3),
     KVLINK_TO_ALL(Float8E5M2), KVLINK_TO_ALL(Int8)},
};

}  // namespace

const RowKernel& KVLINK_JOIN(row_kernel_, KVLINK_ISA)() { return kernel; }

}  // namespace kvlink
