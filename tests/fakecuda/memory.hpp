// What stands for a GPU's memory: addresses that the host cannot touch, and where their bytes really are.
//
// Device addresses are pages without any access, of a file in memory; only this library knows the same file's readable
// and writable mapping. So a host that touches device memory dies of it, and a kernel that leaves its allocations is
// found out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fakecuda {

// A kernel's or copy's bytes are not all in one live allocation, or not aligned: what a GPU answers by losing the
// context.
struct IllegalAccess {
  int status;  // CUresult
};

// Fresh memory holds kPoison, so that what is used before it was written is seen.
inline constexpr unsigned char kPoison = 0xDB;

std::uint64_t allocate_device(std::size_t bytes);  // 0: out of memory
bool free_device(std::uint64_t address);
void* allocate_pinned(std::size_t bytes);
bool free_pinned(void* memory);

enum class Kind { device, pinned, unknown };
Kind kind_of(std::uint64_t address);

// Where this process can touch them. Throws IllegalAccess unless all are of one allocation, and the first at a multiple
// of `alignment`.
void* bytes_at(std::uint64_t address, std::size_t bytes, std::size_t alignment = 1);

struct Counts {
  int device;
  int pinned;
};
Counts live_memory();

}  // namespace fakecuda
