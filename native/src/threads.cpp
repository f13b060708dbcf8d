#include "threads.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace kvlink {

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
  const int error = pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
  if (error != 0) {
    throw std::invalid_argument("a thread cannot be kept to its CPUs: " + std::generic_category().message(error));
  }
}

void relax_cpu() {
#if defined(__x86_64__)
  for (int i = 0; i < 16; ++i) __builtin_ia32_pause();
#endif
}

}  // namespace kvlink
