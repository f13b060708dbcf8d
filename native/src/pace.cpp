#include "pace.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "asked_read.hpp"

namespace kvlink {
namespace {

using namespace std::chrono_literals;

constexpr double kTurnSeconds = 0.004;
// A waiter wakes late, by a timer's grain and by whoever has its core; so much is made up for, and no more: after a
// pause nobody may send for the time in which nobody did.
constexpr Duration kMadeUpFor = 6ms;

double checked(double bytes_per_second) {
  if (!(bytes_per_second > 0) || !std::isfinite(bytes_per_second)) {
    throw std::invalid_argument("a bandwidth cap must be positive and finite");
  }
  return bytes_per_second;
}

std::int64_t turn_of(double bytes_per_second) {
  return static_cast<std::int64_t>(std::clamp(bytes_per_second * kTurnSeconds, 1.0, double{kMaxAskBytes}));
}

}  // namespace

Pace::Pace(double bytes_per_second)
    : bytes_per_second_(checked(bytes_per_second)),
      turn_bytes_(turn_of(bytes_per_second)),
      max_ask_bytes_(std::max(turn_bytes_ / kLeafBytes, std::int64_t{1}) * kLeafBytes),
      turn_(std::chrono::duration_cast<Duration>(
          std::chrono::duration<double>(std::min(static_cast<double>(turn_bytes_) / bytes_per_second_, 3600.0)))) {}

Time Pace::reserve(Time now) {
  const std::lock_guard lock(mutex_);
  const Time at = std::max(next_, now - kMadeUpFor);
  next_ = at + turn_;
  return at;
}

bool Turns::may_ask(Time now) {
  if (!pace_) return true;
  if (left_ > 0 && now - granted_ > kMadeUpFor) left_ = 0;  // nor may it be kept for later
  while (left_ <= 0) {
    if (due_ == Time::max()) due_ = pace_->reserve(now);
    if (now < due_) {
      put_off_ = true;
      return false;
    }
    due_ = Time::max();
    left_ += pace_->turn_bytes();
    granted_ = now;
  }
  return true;
}

Time Turns::put_off_until() { return std::exchange(put_off_, false) ? due_ : Time::max(); }

}  // namespace kvlink
