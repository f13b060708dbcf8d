// A bandwidth cap: bytes are asked for in turns, and turns follow each other at the cap's speed.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "exposures.hpp"

namespace kvlink {

// The order of turns of all engines of a link. Whoever reserves first goes first, so peers and requests share it
// fairly. Any thread.
class Pace {
 public:
  // Positive and finite, or throws std::invalid_argument.
  explicit Pace(double bytes_per_second);

  // What one turn lets through: some milliseconds' worth.
  std::int64_t turn_bytes() const { return turn_bytes_; }
  // Whole leaves: so much may be asked for at a time that no burst is much longer than a turn.
  std::int64_t max_ask_bytes() const { return max_ask_bytes_; }

  // When the next turn may be used: at once, or later, after the turns that were reserved before.
  Time reserve(Time now);

 private:
  const double bytes_per_second_;
  const std::int64_t turn_bytes_;
  const std::int64_t max_ask_bytes_;
  const Duration turn_;
  std::mutex mutex_;
  Time next_{};
};

// One asker's turns; used by its thread. Without a cap it may always ask.
class Turns {
 public:
  explicit Turns(std::shared_ptr<Pace> pace) : pace_(std::move(pace)) {}

  // Call it only with something to ask for: it may reserve a turn. After an ask, tell how much it was.
  bool may_ask() { return !pace_ || may_ask(Clock::now()); }
  bool may_ask(Time now);
  void asked(std::int64_t bytes) { left_ -= bytes; }

  // When an ask that was put off can be made; Time::max() if none was since the last call.
  Time put_off_until();

 private:
  std::shared_ptr<Pace> pace_;
  std::int64_t left_ = 0;  // bytes of turns that are there; less than none after an ask of more than a turn
  Time granted_{};
  Time due_ = Time::max();  // of the turn that is reserved
  bool put_off_ = false;
};

}  // namespace kvlink
