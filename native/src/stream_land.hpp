// What a lane receives: the peer's asks, and the frames that answer ours, scattered to where the bytes belong.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>

#include "iovecs.hpp"
#include "asked_read.hpp"
#include "stream_serve.hpp"

namespace kvlink {

// Whatever the peer sends, bytes only ever go where our own plan puts the stretch that we asked for, and only while its
// read lives: those of a read that was stopped are drained. Used by one thread.
class Landing {
 public:
  explicit Landing(Demand& demand) : demand_(demand) {}

  std::size_t unanswered() const { return asked_.size(); }
  void asked(Demand::Ask ask) { asked_.push_back(std::move(ask)); }

  struct Heard {
    LaneStep step = LaneStep::more;
    std::optional<LaneHeader> ask = std::nullopt;  // the peer's
    bool answered = false;                         // a frame ended
    bool over = false;                             // and with it a read
  };
  // One system call at most. `scratch` takes what is dropped. Throws LaneBroken, and ProtocolViolation on what answers
  // no ask of ours.
  Heard step(int fd, std::span<std::byte> scratch);
  // Lets go of all reads: none is landed here any more.
  void abandon() { asked_.clear(); }

 private:
  LaneStep receive(int fd);
  void fill();
  void drain(std::span<std::byte> scratch);
  void begin_frame();
  void settle();
  bool finish_frame();
  void read_header(Heard& heard);
  void expect_at_least(int fd, std::size_t bytes);

  Demand& demand_;
  std::deque<Demand::Ask> asked_;
  LaneHeader header_;
  std::size_t header_left_ = sizeof(LaneHeader);
  FrameLeft left_{};
  std::array<std::uint64_t, kMaxAskLeaves> theirs_{};
  std::array<std::uint64_t, kMaxAskLeaves> ours_{};
  LaneTrailer trailer_ = 0;
  Stretch piece_{};               // what payload the iovecs are for, or were last
  bool scattering_ = false;       // pieces come into scattered_ first
  std::unique_ptr<std::byte[]> scattered_;  // a piece of runs too short for iovecs, or to be converted; none while idle
  Duration settling_{};           // this frame's pieces
  bool dropping_ = false;
  Iovecs in_;
  int low_water_ = 1;
};

}  // namespace kvlink
