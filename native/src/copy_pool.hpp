// Threads that copy beside an engine's own, so that one core does not bound what a host's memory could do.
//
// How it is used: what is to be copied derives from CopyWork and hands itself out in pieces. The engine's thread offers
// it to the pool, goes on taking pieces itself, and waits for no helper: a helper may be kept from its CPU for long, or
// there may be none. Only the engine's thread speaks to peers and ends reads; a helper that brings a read to its end
// says so by the pool's callback.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "spread.hpp"

namespace kvlink {

class CopyWork {
 public:
  struct Copied {
    std::int64_t bytes = 0;  // of the piece that was taken and brought in; none: there was none to take
    bool over = false;       // with it the engine's thread has something to end
  };

  virtual ~CopyWork() = default;
  // Takes the next piece, some 10 to 100 us of work, and brings it in. Several threads call it at once, and helpers may
  // after the engine's thread has lost interest: what it touches is held by the work itself.
  virtual Copied copy_some() noexcept = 0;
};

class CopyPool {
 public:
  // The threads start at once, and sleep. `over` is called on theirs.
  CopyPool(std::size_t helpers, std::function<void()> over);
  ~CopyPool() { stop(); }
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  // Any thread. Helpers take pieces of it, in turn with those of other work, until they find none; then it is
  // forgotten. Waking them takes a few us, so work of less than that many is not worth it.
  void offer(std::shared_ptr<CopyWork> work);
  // Some helper has a piece in hand.
  bool copying() const { return in_hand_.load(std::memory_order_acquire) != 0; }
  // Helpers keep off the CPU that this is called on.
  void keep_clear_of_here();

  std::vector<std::thread>& threads() { return threads_; }
  // Waits for the pieces in hand. Idempotent; after it nothing that was offered is touched.
  void stop();

 private:
  void help();
  std::shared_ptr<CopyWork> next();
  void copy(const std::shared_ptr<CopyWork>& work);
  void forget(const std::shared_ptr<CopyWork>& work);
  void stand_back(Duration back);

  const std::function<void()> over_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<CopyWork>> offered_;
  std::size_t turn_ = 0;
  bool stopping_ = false;
  std::atomic<bool> any_{false};  // offered, or stopping: what helpers look at without the lock
  std::atomic<std::size_t> in_hand_{0};
  std::atomic<int> engines_cpu_{-1};
  std::vector<std::thread> threads_;
};

}  // namespace kvlink
