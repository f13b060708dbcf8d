// Source side: what attempts may read, for how long, and its leaf digests. No UCX; shared by Python's thread and the
// engine's threads. A lease that went unrenewed for its length is lapsed for good, whoever notices first.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "channel.hpp"
#include "plan.hpp"

namespace kvlink {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: a stopped process finds on waking that time has passed
using Time = Clock::time_point;
using Duration = Clock::duration;

struct ExposureSpec {
  std::string peer;
  AttemptId attempt = 0;
  std::shared_ptr<const Plan> plan;
  std::vector<const std::byte*> regions;             // first byte of each region the plan names, by region number
  std::vector<std::shared_ptr<const void>> keep;     // what must outlive the exposure
  Duration lease{};
};

struct LeaseAnswer {
  bool held = false;
  std::optional<std::uint64_t> root = std::nullopt;
};

struct Lapse {
  std::string peer;
  AttemptId attempt;
};

class Exposure;  // opaque outside exposures.cpp

class Exposures {
 public:
  static constexpr std::size_t kLeavesPerSlice = 64;  // 1 MiB: about 0.1 ms, the longest that withdraw() waits

  // Any thread. `expose` is false if the attempt is exposed already.
  bool expose(ExposureSpec spec, Time now);
  LeaseAnswer lease(std::string_view peer, AttemptId attempt, Time now);
  // After it returned, nothing here touches the attempt's memory.
  LeaseAnswer withdraw(std::string_view peer, AttemptId attempt, Time now);
  std::size_t size() const;

  // Engine's thread from here on. Renewals of unknown attempts are late ones: counted, nothing else.
  std::size_t renew(std::string_view peer, std::span<const AttemptId> attempts, Time now);
  // The exposure to digest, or why there is none.
  struct Wanted {
    std::shared_ptr<Exposure> exposure;
    FailReason reason = FailReason::unknown;
  };
  Wanted want(std::string_view peer, AttemptId attempt, Time now);

  // The next leaves of a wanted exposure. `digests` is valid until the next call; `reason` says why there are no more.
  struct Slice {
    AttemptId attempt = 0;
    std::uint64_t first = 0;
    std::span<const std::uint64_t> digests;
    bool done = false;
    std::optional<FailReason> reason = std::nullopt;
  };
  Slice digest(Exposure& exposure);

  // For a transport that sends the bytes itself, from several threads. As want(), any number of times.
  Wanted find_held(std::string_view peer, AttemptId attempt, Time now) const;

  // While it lives, and is one, the attempt's memory may be read: withdraw() waits for its end, so it is for one
  // bounded piece of work. Otherwise `reason` says why the memory must not be read any more.
  struct Look {
    std::shared_lock<std::shared_mutex> holding;
    FailReason reason = FailReason::unknown;
    explicit operator bool() const { return holding.owns_lock(); }
  };
  Look look(Exposure& exposure, Time now) const;
  static const ExposureSpec& spec_of(const Exposure& exposure);
  // Leaves digested during a look, in any order, perhaps again. The root is known once all are.
  void record(Exposure& exposure, std::size_t first, std::span<const std::uint64_t> digests);

  // Ends all leases of a peer that is gone; returns those that had not been reported as lapsed.
  std::vector<AttemptId> lapse_all(std::string_view peer);
  // Appends lapses not yet reported; returns when the next lease would lapse.
  Time sweep(Time now, std::vector<Lapse>& lapsed);

 private:
  using Attempts = std::unordered_map<AttemptId, std::shared_ptr<Exposure>>;

  std::shared_ptr<Exposure> find(std::string_view peer, AttemptId attempt) const;

  mutable std::mutex mutex_;
  std::map<std::string, Attempts, std::less<>> peers_;
};

}  // namespace kvlink
