// The Unix socket of two ends on one host: small frames, and the file descriptors that go with them.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <initializer_list>
#include <optional>

#include "shared_memory.hpp"
#include "shared_wire.hpp"

namespace kvlink {

// Used by one thread. Whatever cannot go on throws std::runtime_error or ProtocolViolation: the peer is lost.
class SharedLane {
 public:
  // Takes the descriptor over. Throws std::runtime_error unless it is a connected Unix stream socket.
  explicit SharedLane(int fd);

  int fd() const { return socket_.fd(); }

  void send(const Telling& telling, std::initializer_list<int> files = {});
  // A peer that has not read the last bells will wake all the same.
  void ring();

  // The next frame, if a whole one is there.
  std::optional<Telling> receive();
  // A file that came with the frame just received, in order. Throws ProtocolViolation if there is none.
  Descriptor take_file();
  bool has_file() const { return !files_.empty(); }

 private:
  static constexpr std::size_t kFramesPerCall = 16;
  static constexpr std::size_t kMaxFiles = 4;  // that no frame has claimed yet

  bool fill();

  Descriptor socket_;
  std::array<std::byte, kFramesPerCall * sizeof(Telling)> in_;
  std::size_t held_ = 0;
  std::size_t used_ = 0;
  std::deque<Descriptor> files_;
};

}  // namespace kvlink
