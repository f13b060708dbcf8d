#include "stores_found.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvlink {

Stores StoresFound::next(std::int64_t bytes, Time now) {
  const std::chrono::duration<double> since = now - std::exchange(last_, now);
  const auto before = std::exchange(last_bytes_, bytes);
  if (slots_ > kSettling) seconds_per_byte_[slots_ - kSettling - 1] = since.count() / static_cast<double>(before);
  if (slots_++ == kSettling + kMeasured) {
    costs_[way_] = cost();
    choose();
    slots_ = 1;
  }
  return kWays[way_];
}

double StoresFound::cost() const {
  auto sorted = seconds_per_byte_;
  std::sort(sorted.begin(), sorted.end());
  return std::accumulate(sorted.begin(), sorted.end() - kLeftOut, 0.0);
}

void StoresFound::choose() {
  for (std::size_t way = first_; way < kWays.size(); ++way) {
    if (costs_[way] == 0) {
      way_ = way;
      return;
    }
  }
  const auto best = static_cast<std::size_t>(std::min_element(costs_.begin() + first_, costs_.end()) - costs_.begin());
  if (std::exchange(best_, best) != best) patience_ = kPatience;
  way_ = best;
  if (++rounds_ < patience_) return;
  rounds_ = 0;
  patience_ = std::min(2 * patience_, kMaxPatience);
  do {
    tried_ = tried_ + 1 < kWays.size() ? tried_ + 1 : first_;
  } while (tried_ == best);
  way_ = tried_;
}

}  // namespace kvlink
