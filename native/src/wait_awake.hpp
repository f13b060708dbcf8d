// Waiting for a descriptor without sleep: for answers that come sooner than a sleeper wakes.
#pragma once

#include <span>

#include "exposures.hpp"

namespace kvlink {

// What ended a wait that is not by a descriptor.
enum class Awake : int { late = -1, crowded = -2 };

// Looks at the descriptors until one is readable, and says which by its place; late if none is for `most`. The CPU is
// offered to whoever wants it at each look: crowded if it came back only after so long that somebody computes on it.
int wait_awake(std::span<const int> fds, Duration most);

}  // namespace kvlink
