// A waiter that gets out of the way: never onto a CPU that somebody wants, and its CPUs are afterwards what they were.
#include "spread.hpp"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"
#include "threads.hpp"

using namespace kvlink;
using namespace std::chrono_literals;

namespace {

constexpr int kAnybody = 1 << 20;  // so many are known to work that none is a stranger

std::vector<int> cpus_of(pthread_t thread) {
  cpu_set_t set;
  CHECK(pthread_getaffinity_np(thread, sizeof set, &set) == 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

void its_cpus_are_what_they_were() {
  const auto before = cpus_of(pthread_self());
  Spread spread;
  for (Time now = Clock::now(), end = now + 1s; now < end; now += 10ms) {
    CHECK(spread.step_aside(now, kAnybody) == (before.size() > 1));
    CHECK(cpus_of(pthread_self()) == before);
  }
}

void not_twice_in_a_short_time() {
  Spread spread;
  const Time now = Clock::now();
  const bool moved = spread.step_aside(now, kAnybody);
  CHECK(!spread.step_aside(now + 100us, kAnybody));
  CHECK(spread.step_aside(now + 10ms, kAnybody) == moved);
}

void who_was_pinned_stays() {
  std::thread([] {
    const int here = cpus_of(pthread_self()).front();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(here), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(!Spread().step_aside(Clock::now(), kAnybody));
    CHECK(cpus_of(pthread_self()) == std::vector{here});
  }).join();
}

// A computation on every CPU: more than the caller want to run.
void nobody_is_joined_who_computes() {
  std::atomic<bool> done{false};
  std::vector<std::thread> computing;
  for (std::size_t i = 0; i < cpus_of(pthread_self()).size(); ++i) {
    computing.emplace_back([&done] {
      while (!done) continue;
    });
  }
  std::this_thread::sleep_for(5ms);
  Spread spread;
  for (Time now = Clock::now(), end = now + 1s; now < end; now += 10ms) CHECK(!spread.step_aside(now, 0));
  done = true;
  for (std::thread& thread : computing) thread.join();
}

// Whoever keeps a thread to CPUs while it moves has the last word.
void who_keeps_it_meanwhile_is_obeyed() {
  std::atomic<bool> done{false};
  std::thread moving([&done] {
    while (!done) leave_this_cpu();
  });
  const auto all = cpus_of(moving.native_handle());
  for (int round = 0; round < 50; ++round) {
    keep_to_cpus(moving, all);
    std::this_thread::sleep_for(200us);
    keep_to_cpus(moving, {all.front()});
    std::this_thread::sleep_for(200us);
    CHECK(cpus_of(moving.native_handle()) == std::vector{all.front()});
  }
  done = true;
  moving.join();
}

}  // namespace

int main() {
  its_cpus_are_what_they_were();
  not_twice_in_a_short_time();
  who_was_pinned_stays();
  nobody_is_joined_who_computes();
  who_keeps_it_meanwhile_is_obeyed();
}
