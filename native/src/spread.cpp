#include "spread.hpp"

#include <sched.h>

#include <chrono>

namespace kvlink {
namespace {

using namespace std::chrono_literals;

constexpr Duration kAtMostEvery = 1ms;

}  // namespace

bool Spread::step_aside(Time now) {
  if (now - last_ < kAtMostEvery) return false;
  last_ = now;
  cpu_set_t all;
  const int here = sched_getcpu();
  if (here < 0 || sched_getaffinity(0, sizeof all, &all) < 0) return false;
  cpu_set_t others = all;
  CPU_CLR(static_cast<std::size_t>(here), &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) < 0) return false;
  sched_setaffinity(0, sizeof all, &all);
  return true;
}

}  // namespace kvlink
