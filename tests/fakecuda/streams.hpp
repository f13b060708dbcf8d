// Streams as threads: each does its work in order, with delays from a seed before every step, so that work of different
// streams meets in many orders and whatever is not waited for is not done yet.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace fakecuda {

// A point in a stream's work, as one record of an event saw it.
struct Point {
  void pass();
  void wait();
  bool passed();
  double seconds = 0;  // of a steady clock, when passed

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
};

class Stream {
 public:
  Stream();
  ~Stream();  // does what is queued first
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void push(std::function<void()> work);
  void drain();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  bool ending_ = false;
  std::mt19937_64 random_;
  std::thread thread_;
};

// The longest delay before a step, and where delays begin. Streams made later use the seed.
void set_delays(std::uint64_t seed, unsigned max_microseconds);
void drain_all();
int live_streams();

// The first failure of a kernel or copy; all later calls answer with it, as a lost context does.
int lost();
void lose(int status);
void mend();

}  // namespace fakecuda
