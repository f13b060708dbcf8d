#include "spread.hpp"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <chrono>

#include "threads.hpp"

namespace kvlink {
namespace {

using namespace std::chrono_literals;

constexpr Duration kAtMostEvery = 1ms;

// Threads that run or want to, on all CPUs; some number that is never small where the kernel does not say.
int wanting_to_run() {
  constexpr int kUnknown = 1 << 30;
  const int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return kUnknown;
  char text[128];
  const ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  text[got < 0 ? 0 : got] = '\0';
  int running = kUnknown;
  return sscanf(text, "%*s %*s %*s %d/", &running) == 1 ? running : kUnknown;
}

}  // namespace

bool Spread::step_aside(Time now, int working) {
  if (now - last_ < kAtMostEvery) return false;
  last_ = now;
  return wanting_to_run() <= 1 + working && leave_this_cpu();
}

}  // namespace kvlink
