#include "copy_pool.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "threads.hpp"

namespace kvlink {
namespace {

using namespace std::chrono_literals;

// Reads follow each other; a sleeper takes about as long to wake.
constexpr Duration kLinger = 50us;
// A helper that was kept from its CPU for so long inside one piece is in somebody's way, and stands back: the longer
// the sooner it is kept waiting again. (Always 50 ms took 12% of a CPU from a computation, and moved 2% more.)
constexpr Duration kKeptWaiting = 1ms;
constexpr Duration kStandBack = 20ms;
constexpr Duration kLongestStandBack = 640ms;
constexpr int kNicer = 5;

// On CPUs that nobody else wants: whoever computes comes first. Not at the lowest priority of all: a read's blocks
// cannot be given back while a helper that never runs holds a piece of it.
void give_way() {
  const sched_param none{};
  sched_setscheduler(0, SCHED_BATCH, &none);
  [[maybe_unused]] const int now = nice(kNicer);
}

}  // namespace

CopyPool::CopyPool(std::size_t helpers, std::function<void()> over) : over_(std::move(over)) {
  try {
    while (threads_.size() < helpers) {
      threads_.push_back(start_without_signals("kvlink-copy", [this] { help(); }));
    }
  } catch (...) {
    stop();
    throw;
  }
}

void CopyPool::offer(std::shared_ptr<CopyWork> work) {
  if (threads_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (std::find(offered_.begin(), offered_.end(), work) != offered_.end()) return;
    offered_.push_back(std::move(work));
    any_ = true;
  }
  changed_.notify_all();
}

void CopyPool::keep_clear_of_here() { engines_cpu_.store(sched_getcpu(), std::memory_order_relaxed); }

void CopyPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = any_ = true;
    offered_.clear();
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// --- a helper -------------------------------------------------------------------------------------------------------

void CopyPool::help() {
  give_way();
  Spread spread;
  Time kept_waiting{};
  Duration back{};
  while (const auto work = next()) {
    const Time began = Clock::now();
    const Duration ran = thread_ran();
    copy(work);
    const Time now = Clock::now();
    if ((now - began) - (thread_ran() - ran) > kKeptWaiting) {
      back = now - std::exchange(kept_waiting, now) < 4 * back ? std::min(2 * back, kLongestStandBack) : kStandBack;
      stand_back(back);
    }
    if (sched_getcpu() == engines_cpu_.load(std::memory_order_relaxed)) {
      spread.step_aside(now, 1 + static_cast<int>(in_hand_.load(std::memory_order_relaxed)));
    }
  }
}

// None: the pool stops.
std::shared_ptr<CopyWork> CopyPool::next() {
  for (Time end{}; !any_.load(std::memory_order_relaxed);) {
    const Time now = Clock::now();
    if (end == Time{}) end = now + kLinger;
    if (now >= end) break;
    relax_cpu();
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return any_.load(std::memory_order_relaxed); });
  if (stopping_) return nullptr;
  return offered_[turn_++ % offered_.size()];
}

void CopyPool::copy(const std::shared_ptr<CopyWork>& work) {
  in_hand_.fetch_add(1, std::memory_order_relaxed);
  const auto copied = work->copy_some();
  in_hand_.fetch_sub(1, std::memory_order_release);
  if (copied.bytes == 0) forget(work);
  if (copied.over) over_();
}

void CopyPool::forget(const std::shared_ptr<CopyWork>& work) {
  const std::lock_guard lock(mutex_);
  std::erase(offered_, work);
  any_ = stopping_ || !offered_.empty();
}

void CopyPool::stand_back(Duration back) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, back, [this] { return stopping_; });
}

}  // namespace kvlink
