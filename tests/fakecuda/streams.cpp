#include "streams.hpp"

#include <atomic>
#include <chrono>
#include <set>
#include <utility>

#include "memory.hpp"

namespace fakecuda {
namespace {

std::atomic<unsigned> max_microseconds{0};
std::atomic<std::uint64_t> next_seed{1};
std::atomic<int> first_failure{0};
std::mutex all_mutex;
std::set<Stream*> all;

}  // namespace

void Point::pass() {
  const std::lock_guard lock(mutex_);
  seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  passed_ = true;
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
}

bool Point::passed() {
  const std::lock_guard lock(mutex_);
  return passed_;
}

Stream::Stream() : random_(next_seed++), thread_([this] { run(); }) {
  const std::lock_guard lock(all_mutex);
  all.insert(this);
}

Stream::~Stream() {
  {
    const std::lock_guard lock(all_mutex);
    all.erase(this);
  }
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Stream::push(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    if (const unsigned most = max_microseconds; most != 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % (most + 1)));
    }
    try {
      work();
    } catch (const IllegalAccess& fault) {
      lose(fault.status);
    }
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void set_delays(std::uint64_t seed, unsigned most) {
  next_seed = seed * 1000 + 1;
  max_microseconds = most;
}

void drain_all() {
  const std::lock_guard lock(all_mutex);  // nothing that is queued makes or ends a stream
  for (Stream* stream : all) stream->drain();
}

int live_streams() {
  const std::lock_guard lock(all_mutex);
  return static_cast<int>(all.size());
}

int lost() { return first_failure; }

void lose(int status) {
  int none = 0;
  first_failure.compare_exchange_strong(none, status);
}

void mend() { first_failure = 0; }

}  // namespace fakecuda
