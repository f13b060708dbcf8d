// Who is at the other end of a lane, so that its memory may be read by the kernel's own copy (process_vm_readv): a
// number names a process for only as long as it lives, and a read of another's memory must never pass for our peer's.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "shared_memory.hpp"

namespace kvlink {

// A number at an address of ours, by which a peer sees that it reads this process and may. Not what a fork copies.
class Nonce {
 public:
  // Throws std::system_error.
  Nonce();
  ~Nonce();
  Nonce(const Nonce&) = delete;
  Nonce& operator=(const Nonce&) = delete;

  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(page_); }
  std::uint64_t value() const { return *page_; }  // never 0

 private:
  std::uint64_t* page_;
};

// The process that the lane leads to, as the kernel names it here. It may be read once it has been proven. The engine's
// thread alone finds out; pid(), is_there() and forbid() are for any thread.
class PeerProcess {
 public:
  // Nobody needs the lane afterwards: it is duplicated.
  explicit PeerProcess(int lane_fd);

  // It says that the number lies at an address of its.
  void prove(std::uint64_t address, std::uint64_t nonce);
  bool proven() const { return proven_; }
  // Why it cannot be read, if that is known.
  std::string refusal() const;

  pid_t pid() const { return pid_; }
  // Whether it lives, and still has its end of the lane: true after a read of its memory means that it was its memory.
  // A process that began another program (exec) has no end of the lane any more.
  bool is_there() const;
  // The kernel has changed its mind.
  void forbid() const { forbidden_.store(true, std::memory_order_relaxed); }

 private:
  pid_t pid_ = 0;
  Descriptor lane_;
  Descriptor process_;
  bool proven_ = false;
  std::string refusal_;
  mutable std::atomic<bool> forbidden_{false};
};

}  // namespace kvlink
