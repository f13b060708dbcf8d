// What a lane sends: our asks, and the frames that answer the peer's, gathered from where the bytes lie.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exposures.hpp"
#include "iovecs.hpp"
#include "stream_wire.hpp"

namespace kvlink {

// The socket is of no more use; what() says why.
class LaneBroken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What one system call on a lane's socket came to.
enum class LaneStep { idle, more, blocked };

// The peer gets bytes only of an attempt that is exposed to it, inside that attempt's plan, and under its lease: looked
// at anew before every system call. Used by one thread.
class Serving {
 public:
  // `peer` is whom the exposures are looked up for.
  Serving(Exposures& exposures, std::string peer) : exposures_(exposures), peer_(std::move(peer)) {}

  void ask(const LaneHeader& header) { asks_.push_back(header); }
  // Takes the peer's ask; throws ProtocolViolation if it cannot be one, or is one too many.
  void accept(const LaneHeader& header);
  bool idle() const { return asks_.empty() && accepted_.empty() && left_.total() == 0; }

  // One system call at most. Throws LaneBroken, and ProtocolViolation on an ask for what the plan does not have.
  LaneStep step(int fd);

 private:
  void begin();
  void load(const ExposureSpec& spec);
  void end_frame();
  void void_rest(FailReason reason);

  Exposures& exposures_;
  const std::string peer_;
  std::vector<LaneHeader> asks_;    // to be sent at the next border between frames
  std::vector<LaneHeader> sending_; // being sent
  std::deque<LaneHeader> accepted_;

  LaneHeader header_;               // of the frame being sent
  std::array<std::uint64_t, kMaxAskLeaves> digests_{};
  LaneTrailer trailer_ = 0;
  FrameLeft left_{};
  std::shared_ptr<Exposure> exposure_;
  std::int64_t loaded_ = 0;         // wire bytes up to here are among the iovecs, or have passed
  std::unique_ptr<std::byte[]> gathered_;  // the piece that is being sent, if it is packed; none while idle
  Iovecs out_;
};

}  // namespace kvlink
