#include "asked_read.hpp"

#include <algorithm>
#include <utility>

namespace kvlink {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

// A read that fits into few asks is cut so that every lane has some of it.
AskedRead::AskedRead(ReadSpec spec, std::shared_ptr<const void> keep, std::size_t lanes, std::int64_t max_ask_bytes)
    : ActiveRead(std::move(spec)),
      keep_(std::move(keep)),
      chunk_bytes_(std::min({std::int64_t{spec_.chunk_leaves} * kLeafBytes, max_ask_bytes, spec_.max_ask_bytes})) {
  max_ask_bytes = std::min(max_ask_bytes, spec_.max_ask_bytes);
  const std::int64_t share = ceil_div(ceil_div(total(), chunk_bytes_), 2 * static_cast<std::int64_t>(lanes));
  ask_bytes_ = std::clamp(share, std::int64_t{1}, max_ask_bytes / chunk_bytes_) * chunk_bytes_;
}

std::optional<Stretch> AskedRead::take() {
  const std::lock_guard lock(mutex_);
  if (outcome_) return std::nullopt;
  if (!again_.empty()) {
    const Stretch stretch = again_.front();
    again_.pop_front();
    return stretch;
  }
  if (taken_ == total()) return std::nullopt;
  if (!first_asked_) first_asked_ = Clock::now();
  const Stretch stretch{taken_, std::min(taken_ + ask_bytes_, total())};
  taken_ = stretch.end;
  return stretch;
}

void AskedRead::take_up_to(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  ask_bytes_ = std::max(std::int64_t{1}, std::min(bytes, spec_.max_ask_bytes) / chunk_bytes_) * chunk_bytes_;
}

std::size_t AskedRead::left() const {
  const std::lock_guard lock(mutex_);
  return outcome_ ? 0 : again_.size() + static_cast<std::size_t>(ceil_div(total() - taken_, ask_bytes_));
}

bool AskedRead::enter() {
  const std::lock_guard lock(mutex_);
  if (outcome_) return false;
  ++inside_;
  return true;
}

bool AskedRead::exit() {
  const std::lock_guard lock(mutex_);
  --inside_;
  return is_over();
}

bool AskedRead::landed(Stretch stretch, std::span<const std::uint64_t> theirs, std::span<const std::uint64_t> ours,
                        Duration hashing) {
  const std::lock_guard lock(mutex_);
  count_landed(stretch.end - stretch.begin);
  verify_time_ += hashing;
  const std::int64_t first_leaf = stretch.begin / kLeafBytes;
  std::copy(ours.begin(), ours.end(), ours_.begin() + (ours.empty() ? 0 : first_leaf));
  for (std::int64_t begin = stretch.begin; begin < stretch.end && !outcome_; begin += chunk_bytes_) {
    const std::int64_t end = std::min(begin + chunk_bytes_, stretch.end);
    const auto first = ours.begin() + (ours.empty() ? 0 : begin / kLeafBytes - first_leaf);
    const auto last = ours.begin() + (ours.empty() ? 0 : leaf_count(end) - first_leaf);
    const auto differs = std::mismatch(first, last, theirs.begin() + (first - ours.begin())).first;
    if (differs == last) {
      finished_ += end - begin;
    } else if (may_read_again(static_cast<std::uint64_t>(first_leaf + (differs - ours.begin())), rereads_[begin])) {
      ++rereads_[begin];
      again_.push_back({begin, end});
    }
  }
  return !again_.empty();
}

void AskedRead::stop(Outcome outcome, std::string detail) {
  const std::lock_guard lock(mutex_);
  ActiveRead::stop(outcome, std::move(detail));
}

bool AskedRead::stopped() const {
  const std::lock_guard lock(mutex_);
  return ActiveRead::stopped();
}

bool AskedRead::over() const {
  const std::lock_guard lock(mutex_);
  return is_over();
}

Completion AskedRead::completion() const {
  const std::lock_guard lock(mutex_);
  return ActiveRead::completion();
}

void Demand::add(std::shared_ptr<AskedRead> read) {
  const std::lock_guard lock(mutex_);
  reads_.push_back(std::move(read));
}

bool Demand::any() {
  const std::lock_guard lock(mutex_);
  return !reads_.empty();
}

std::optional<Demand::Ask> Demand::take(std::size_t unanswered) {
  const std::lock_guard lock(mutex_);
  while (!reads_.empty()) {
    const std::size_t left = reads_.front()->left() + reads_.size() - 1;
    if (unanswered >= std::clamp((left + lanes_ - 1) / lanes_, std::size_t{1}, kMaxAsks)) return std::nullopt;
    auto read = std::move(reads_.front());
    reads_.pop_front();
    if (const auto stretch = read->take()) {
      if (read->left() > 0) reads_.push_back(read);
      return Ask{std::move(read), *stretch};
    }
  }
  return std::nullopt;
}

}  // namespace kvlink
