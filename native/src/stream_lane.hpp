// A lane: one stream socket to one peer, on which payload travels in both directions. It belongs to one mover.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "stream_land.hpp"
#include "asked_read.hpp"
#include "pace.hpp"
#include "stream_serve.hpp"

namespace kvlink {

class Lane {
 public:
  // Takes the descriptor over. Throws std::runtime_error if it cannot be used.
  explicit Lane(int fd);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Before a mover has it: whose lane it is, what its asks may read, and what is to be asked for.
  void join(std::string peer, Exposures& exposures, std::shared_ptr<Demand> demand, std::shared_ptr<Pace> pace);

  // --- the mover's thread from here on ---
  int fd() const { return fd_; }
  const std::string& peer() const { return peer_; }

  // Each throws LaneBroken or ProtocolViolation when the lane, and with it the peer, is lost.
  struct Received {
    LaneStep step;
    bool over;  // a read may have ended
  };
  Received receive(std::span<std::byte> scratch);
  LaneStep send();
  // Takes what is to be asked for, as far as there is room; true if there is something to send.
  bool ask();
  // When to ask() again for what the bandwidth cap has put off; Time::max() if it has nothing.
  Time ask_at() const { return ask_at_; }

  // Nothing of it lands or leaves any more. closed() may be asked on any thread.
  void close();
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // The mover's notes: whether the lane is among those to be stepped, and what epoll is to watch for.
  bool receiving = false;
  bool sending = false;
  bool watching_write = false;

 private:
  int fd_;
  std::string peer_;
  std::shared_ptr<Demand> demand_;
  Turns turns_{nullptr};
  Time ask_at_ = Time::max();
  std::unique_ptr<Serving> serving_;
  std::unique_ptr<Landing> landing_;
  std::atomic<bool> closed_ = false;
};

}  // namespace kvlink
