// What the cost model measures at start-up that nothing else does: sockets, and memory that is cold.
#pragma once

#include <cstddef>
#include <span>

#include "plan.hpp"

namespace kvlink {

struct SocketCost {
  double send_seconds;
  double receive_seconds;
};

// Sends a plan's source side through a TCP connection of this host to itself and receives it into the target side, call
// by call in the calling thread. Throws std::system_error where there is no such connection to be had.
SocketCost socket_cost(const Plan& plan, std::span<const std::byte* const> sources,
                       std::span<std::byte* const> targets);

// Drops memory from all caches, so that whoever touches it next finds it as a transfer finds a block. Nothing happens
// on CPUs that do not let a process do this.
void evict(const std::byte* data, std::size_t bytes);

}  // namespace kvlink
