// How slots that another core reads are best written on this machine, found while at work.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "carry.hpp"
#include "exposures.hpp"

namespace kvlink {

// Where two cores share a cache, plain stores and the string instruction leave a slot in it (256 KiB slots, runs of 64
// KiB: 20 GB/s; streamed 15); where they do not, lines have far to go and streaming to memory is best by far (22, plain
// 5). Machines move virtual CPUs from one to the other. What counts is the pace at which slots follow each other, since
// the reader's waits are part of what a way costs. So each way is tried for some slots, and the others now and then
// again, the seldomer the longer one has been the best. Used by one thread.
class StoresFound {
 public:
  // `strings`: rows are long enough for them.
  explicit StoresFound(bool strings) : first_(strings ? 0 : 1), way_(first_) {}

  // The way for a slot of so many bytes that is begun now.
  Stores next(std::int64_t bytes, Time now);

 private:
  static constexpr std::array kWays{Stores::strings, Stores::plain, Stores::streamed};
  static constexpr std::size_t kSettling = 8;  // slots that the other end still has from before
  static constexpr std::size_t kMeasured = 16;
  static constexpr std::size_t kLeftOut = 2;  // the longest: pauses between reads
  static constexpr std::uint32_t kPatience = 64;
  static constexpr std::uint32_t kMaxPatience = 1024;

  double cost() const;
  void choose();

  const std::size_t first_;
  std::size_t way_;
  std::size_t slots_ = 0;  // begun this way, in a row
  std::array<double, kMeasured> seconds_per_byte_{};
  std::array<double, kWays.size()> costs_{};  // 0: not tried yet
  std::size_t best_ = kWays.size();           // none yet
  std::size_t tried_ = 0;                     // the last that was, beside the best
  std::uint32_t rounds_ = 0;                  // since then
  std::uint32_t patience_ = kPatience;
  Time last_{};
  std::int64_t last_bytes_ = 0;
};

}  // namespace kvlink
