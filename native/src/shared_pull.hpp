// Bytes out of another process's memory by the kernel's own copy: one pass where neither maps the other's memory.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "plan.hpp"

namespace kvlink {

// Where a region of another process's lies there: an address that means nothing here.
struct FarRegion {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
};

// Brings wire bytes [begin, end) of a plan out of process `pid` into our regions, with the digests of what was written
// if `leaves` are given, whoever writes the source meanwhile. Any thread. The caller has checked the plan's bounds on
// the target's side, and checks afterwards that the process was who it took it for: until then the bytes are nobody's.
// Throws std::system_error with the kernel's word (EFAULT: it has no such memory), and std::invalid_argument, before a
// byte of that run is read, on a run that leaves its region.
void pull(pid_t pid, const Plan& plan, std::span<const FarRegion> from, std::span<std::byte* const> to,
          std::int64_t begin, std::int64_t end, std::span<std::uint64_t> leaves = {});

}  // namespace kvlink
