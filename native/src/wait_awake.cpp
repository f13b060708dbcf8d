#include "wait_awake.hpp"

#include <poll.h>
#include <sched.h>

#include <chrono>
#include <vector>

namespace kvlink {
namespace {

using namespace std::chrono_literals;

// Our own threads keep the CPU for less, between two sleeps of theirs in a short request; another's slice is longer.
constexpr Duration kOthersTurn = 700us;

}  // namespace

int wait_awake(std::span<const int> fds, Duration most) {
  std::vector<pollfd> watched;
  for (const int fd : fds) watched.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  Time before = Clock::now();
  const Time end = before + most;
  while (true) {
    if (poll(watched.data(), watched.size(), 0) > 0) {
      for (std::size_t i = 0; i < watched.size(); ++i) {
        if (watched[i].revents != 0) return static_cast<int>(i);
      }
    }
    const Time now = Clock::now();
    if (now - before > kOthersTurn) return static_cast<int>(Awake::crowded);
    if (now >= end) return static_cast<int>(Awake::late);
    before = now;
    sched_yield();
  }
}

}  // namespace kvlink
