#include "threads.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace kvlink {
namespace {

// A thread's CPUs are read and written back by itself while others may set them.
std::mutex& affinity_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

std::thread start_without_signals(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread([name, body = std::move(body)] {
      pthread_setname_np(pthread_self(), name);
      body();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

void keep_to_cpus(std::thread& thread, const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) throw std::invalid_argument("no CPU " + std::to_string(cpu));
    CPU_SET(cpu, &set);
  }
  const std::lock_guard lock(affinity_mutex());
  const int error = pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
  if (error != 0) {
    throw std::invalid_argument("a thread cannot be kept to its CPUs: " + std::generic_category().message(error));
  }
}

bool leave_this_cpu() {
  const std::lock_guard lock(affinity_mutex());
  cpu_set_t all;
  const int here = sched_getcpu();
  if (here < 0 || sched_getaffinity(0, sizeof all, &all) < 0) return false;
  cpu_set_t others = all;
  CPU_CLR(static_cast<std::size_t>(here), &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) < 0) return false;
  cpu_set_t now;
  const bool as_set = sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &others);
  if (as_set) sched_setaffinity(0, sizeof all, &all);
  return true;
}

std::chrono::nanoseconds thread_ran() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

void relax_cpu() {
#if defined(__x86_64__)
  for (int i = 0; i < 16; ++i) __builtin_ia32_pause();
#endif
}

}  // namespace kvlink
