#include "exposures.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

#include "digest.hpp"

namespace kvlink {

// The lease's fields are guarded by Exposures::mutex_, the digest's by `hashing`. Whoever needs both takes `hashing`
// first. So asking for a lease never waits for a digest. `looking` is held, shared, by those who read the memory.
class Exposure {
 public:
  Exposure(ExposureSpec s, Time now) : spec(std::move(s)), renewed(now) {}

  // The clock decides when it is asked, so it makes no difference who notices a lapse first.
  bool held(Time now) {
    lapsed = lapsed || now - renewed > spec.lease;
    return !lapsed;
  }

  const ExposureSpec spec;

  Time renewed;
  bool lapsed = false;
  bool reported = false;
  std::optional<std::uint64_t> root;

  std::mutex hashing;
  bool wanted = false;
  std::atomic<bool> withdrawn = false;
  std::vector<std::uint64_t> digests;
  std::vector<bool> recorded;
  std::size_t unrecorded = 0;

  std::shared_mutex looking;
};

std::shared_ptr<Exposure> Exposures::find(std::string_view peer, AttemptId attempt) const {
  const auto attempts = peers_.find(peer);
  if (attempts == peers_.end()) return nullptr;
  const auto found = attempts->second.find(attempt);
  return found == attempts->second.end() ? nullptr : found->second;
}

bool Exposures::expose(ExposureSpec spec, Time now) {
  const std::lock_guard lock(mutex_);
  const auto attempt = spec.attempt;
  auto& attempts = peers_[spec.peer];
  return attempts.try_emplace(attempt, std::make_shared<Exposure>(std::move(spec), now)).second;
}

LeaseAnswer Exposures::lease(std::string_view peer, AttemptId attempt, Time now) {
  const std::lock_guard lock(mutex_);
  const auto exposure = find(peer, attempt);
  return exposure ? LeaseAnswer{exposure->held(now), exposure->root} : LeaseAnswer{};
}

LeaseAnswer Exposures::withdraw(std::string_view peer, AttemptId attempt, Time now) {
  std::shared_ptr<Exposure> exposure;
  LeaseAnswer answer;
  {
    const std::lock_guard lock(mutex_);
    exposure = find(peer, attempt);
    if (!exposure) return answer;
    answer = {exposure->held(now), exposure->root};
    const auto attempts = peers_.find(peer);
    attempts->second.erase(attempt);
    if (attempts->second.empty()) peers_.erase(attempts);
  }
  exposure->withdrawn = true;  // first, so that nobody begins another look while this waits for the last one
  { const std::lock_guard slice_ended(exposure->hashing); }  // never both at once: who looks may record
  { const std::lock_guard looks_ended(exposure->looking); }
  return answer;
}

std::size_t Exposures::size() const {
  const std::lock_guard lock(mutex_);
  std::size_t count = 0;
  for (const auto& [peer, attempts] : peers_) count += attempts.size();
  return count;
}

std::size_t Exposures::renew(std::string_view peer, std::span<const AttemptId> attempts, Time now) {
  const std::lock_guard lock(mutex_);
  std::size_t late = 0;
  for (const AttemptId attempt : attempts) {
    const auto exposure = find(peer, attempt);
    if (!exposure) {
      ++late;
    } else if (exposure->held(now)) {
      exposure->renewed = now;
    }
  }
  return late;
}

Exposures::Wanted Exposures::want(std::string_view peer, AttemptId attempt, Time now) {
  std::shared_ptr<Exposure> exposure;
  {
    const std::lock_guard lock(mutex_);
    exposure = find(peer, attempt);
    if (!exposure) return {nullptr, FailReason::unknown};
    if (!exposure->held(now)) return {nullptr, FailReason::lapsed};
  }
  const std::lock_guard lock(exposure->hashing);
  if (exposure->wanted) throw ProtocolViolation("leaves of attempt " + std::to_string(attempt) + " wanted twice");
  exposure->wanted = true;
  return {exposure, FailReason::unknown};
}

Exposures::Slice Exposures::digest(Exposure& exposure) {
  const std::lock_guard hashing(exposure.hashing);
  auto& digests = exposure.digests;
  const auto& spec = exposure.spec;
  Slice slice{.attempt = spec.attempt, .first = digests.size(), .digests = {}};
  if (exposure.withdrawn) {
    slice.reason = FailReason::withdrawn;
  } else if (const std::lock_guard lock(mutex_); exposure.lapsed) {
    slice.reason = FailReason::lapsed;
  }
  slice.done = slice.reason.has_value();
  if (slice.done) return slice;

  const auto leaves = static_cast<std::size_t>(leaf_count(spec.plan->total_bytes()));
  if (digests.capacity() < leaves) digests.reserve(leaves);
  const std::size_t count = std::min(kLeavesPerSlice, leaves - digests.size());
  digests.resize(digests.size() + count);
  slice.digests = std::span(digests).subspan(slice.first, count);
  digest_leaves(*spec.plan, Side::source, spec.regions, static_cast<std::int64_t>(slice.first),
                std::span(digests).subspan(slice.first, count));
  slice.done = digests.size() == leaves;
  if (slice.done) {
    const auto root = digest_root(digests);
    const std::lock_guard lock(mutex_);
    exposure.root = root;
  }
  return slice;
}

Exposures::Wanted Exposures::find_held(std::string_view peer, AttemptId attempt, Time now) const {
  const std::lock_guard lock(mutex_);
  auto exposure = find(peer, attempt);
  if (!exposure) return {nullptr, FailReason::unknown};
  if (!exposure->held(now)) return {nullptr, FailReason::lapsed};
  return {std::move(exposure), FailReason::unknown};
}

Exposures::Look Exposures::look(Exposure& exposure, Time now) const {
  Look look;
  {
    const std::lock_guard lock(mutex_);
    if (!exposure.held(now)) look.reason = FailReason::lapsed;
  }
  if (exposure.withdrawn) look.reason = FailReason::withdrawn;
  if (look.reason != FailReason::unknown) return look;
  look.holding = std::shared_lock(exposure.looking);
  if (exposure.withdrawn) return {.holding = {}, .reason = FailReason::withdrawn};
  return look;
}

const ExposureSpec& Exposures::spec_of(const Exposure& exposure) { return exposure.spec; }

void Exposures::record(Exposure& exposure, std::size_t first, std::span<const std::uint64_t> digests) {
  const std::lock_guard hashing(exposure.hashing);
  if (exposure.recorded.empty()) {
    exposure.unrecorded = static_cast<std::size_t>(leaf_count(exposure.spec.plan->total_bytes()));
    exposure.recorded.resize(exposure.unrecorded);
    exposure.digests.resize(exposure.unrecorded);
  }
  for (std::size_t i = 0; i < digests.size(); ++i) {
    exposure.digests[first + i] = digests[i];
    if (!exposure.recorded[first + i]) --exposure.unrecorded;
    exposure.recorded[first + i] = true;
  }
  if (exposure.unrecorded > 0) return;
  const auto root = digest_root(exposure.digests);
  const std::lock_guard lock(mutex_);
  exposure.root = root;
}

std::vector<AttemptId> Exposures::lapse_all(std::string_view peer) {
  const std::lock_guard lock(mutex_);
  std::vector<AttemptId> lapsed;
  const auto attempts = peers_.find(peer);
  if (attempts == peers_.end()) return lapsed;
  for (auto& [attempt, exposure] : attempts->second) {
    exposure->lapsed = true;
    if (!std::exchange(exposure->reported, true)) lapsed.push_back(attempt);
  }
  return lapsed;
}

Time Exposures::sweep(Time now, std::vector<Lapse>& lapsed) {
  const std::lock_guard lock(mutex_);
  Time next = Time::max();
  for (auto& [peer, attempts] : peers_) {
    for (auto& [attempt, exposure] : attempts) {
      if (exposure->held(now)) {
        next = std::min(next, exposure->renewed + exposure->spec.lease);
      } else if (!std::exchange(exposure->reported, true)) {
        lapsed.push_back({peer, attempt});
      }
    }
  }
  return next;
}

}  // namespace kvlink
