// Compiled once per instruction set, with its flags and KVLINK_HASH_ISA. Include no C++ library header here: the linker
// keeps one copy of an inline function, and if it were this file's, the whole library would need this instruction set.
#define XXH_INLINE_ALL
#include "xxhash.h"

#include "hash_kernel.hpp"

#define KVLINK_JOIN2(a, b) a##b
#define KVLINK_JOIN(a, b) KVLINK_JOIN2(a, b)

namespace kvlink {

uint64_t KVLINK_JOIN(xxh3_64_, KVLINK_HASH_ISA)(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

}  // namespace kvlink
