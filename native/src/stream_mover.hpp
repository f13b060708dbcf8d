// Steps lanes: one mover for the first lane of every peer, one for every second, and so on. Asleep when there is
// nothing to move.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "events.hpp"
#include "stream_lane.hpp"

namespace kvlink {

class Mover {
 public:
  // Told from the mover's thread.
  struct Reports {
    std::function<void()> read_over;  // or a lane closed
    std::function<void(const std::string& peer, std::string detail)> lane_lost;
  };

  explicit Mover(Reports reports);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // Readable while there is something to do.
  int fd() const { return epoll_; }

  // Any thread. A lane is added once, poked when there may be something to ask for, and dropped once: after that it
  // closes, and read_over() is reported.
  void add(std::shared_ptr<Lane> lane) { tell(Word::add, std::move(lane)); }
  void poke(std::shared_ptr<Lane> lane) { tell(Word::poke, std::move(lane)); }
  void drop(std::shared_ptr<Lane> lane) { tell(Word::drop, std::move(lane)); }

  // When a lane is to ask again for what the bandwidth cap has put off.
  Time wake_by() const;

  // One step of every lane that can make one: bounded. If none can, waits up to `timeout_ms` (-1: for ever). True if
  // one may make another at once.
  bool turn(int timeout_ms);
  // For a mover with a thread of its own: turns until stop().
  void run();
  void stop() { tell(Word::stop, nullptr); }

 private:
  enum class Word { add, poke, drop, stop };
  struct Command {
    Word word;
    std::shared_ptr<Lane> lane;
  };

  void tell(Word word, std::shared_ptr<Lane> lane) { commands_.push({word, std::move(lane)}); }
  void obey();
  void ask_again();
  void forget(const std::shared_ptr<Lane>& lane);
  void step(Lane& lane);
  void lose(Lane& lane, std::string detail);
  void schedule(Lane& lane, bool receive, bool send);
  void watch(Lane& lane, bool write);

  const Reports reports_;
  const int epoll_;
  CommandQueue<Command> commands_;
  std::vector<Command> taken_;
  std::vector<std::shared_ptr<Lane>> lanes_;  // keeps them alive: epoll and active_ hold their addresses
  std::vector<Lane*> active_;
  std::vector<Lane*> stepping_;
  std::vector<std::byte> scratch_;
  bool done_ = false;
};

}  // namespace kvlink
