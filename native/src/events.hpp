// What passes between Python's thread and an engine's thread: commands in, completions out, an eventfd each way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvlink {

// Values of kvlink.transports.base.CompletionKind and Outcome (a test compares them).
enum class CompletionKind : int { connected = 1, disconnected, read, cut_off, peer_lost, lease_lapsed };
enum class Outcome : int {
  ok = 0, cut_off, peer_lost, digest_mismatch, source_failed, unreachable, incompatible, protocol, failed
};

// Mirrors kvlink.transports.base.Completion.
struct Completion {
  CompletionKind kind;
  std::uint64_t op = 0;
  std::string peer;
  std::uint64_t attempt = 0;
  Outcome outcome = Outcome::ok;
  std::uint64_t bytes_moved = 0;
  std::optional<std::uint64_t> root = std::nullopt;
  std::uint32_t rereads = 0;
  std::optional<std::uint64_t> bad_leaf = std::nullopt;
  double wire_seconds = 0;
  double verify_seconds = 0;
  std::string detail = {};
  std::string path = {};         // of a transport that has several
  std::string path_reason = {};
};

// A file descriptor that is readable from signal() to clear().
class EventFd {
 public:
  EventFd();
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int fd() const { return fd_; }
  void signal() const;
  // How many signals it took away.
  std::uint64_t clear() const;

 private:
  int fd_;
};

// Engine's thread pushes, Python's pops in batches. The descriptor is written only when the queue stops being empty,
// and outside the lock: on few cores whoever it wakes runs at once, and would only fall asleep again on the lock. It
// may so be signalled for what was taken already; nothing is ever left unsignalled.
class CompletionQueue {
 public:
  int fd() const { return event_.fd(); }
  void push(Completion completion);
  std::vector<Completion> pop(std::size_t limit);
  // Clears the descriptor; false, and it stays readable, if completions are waiting.
  bool arm();

 private:
  std::mutex mutex_;
  std::deque<Completion> waiting_;
  EventFd event_;
};

// Python's thread pushes, the engine's takes all there is; signalled as above. A signal that comes after its command
// was taken is owed, and cleared by a later take(): nobody else would, and the descriptor would keep its waiter awake.
template <typename Command>
class CommandQueue {
 public:
  int fd() const { return event_.fd(); }

  void push(Command command) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(command));
      if (std::exchange(signalled_, true)) return;
      ++owed_;
    }
    event_.signal();
  }

  // To be taken with the next that is pushed, or whenever the thread wakes: nobody waits for it.
  void push_unhurried(Command command) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(command));
  }

  // Fills `taken`, which must be empty.
  void take(std::vector<Command>& taken) {
    const std::lock_guard lock(mutex_);
    std::swap(waiting_, taken);
    signalled_ = false;
    if (owed_ > 0) owed_ -= event_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<Command> waiting_;
  bool signalled_ = false;
  std::uint64_t owed_ = 0;
  EventFd event_;
};

}  // namespace kvlink
