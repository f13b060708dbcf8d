// Two engines in one process, both reading, with leases, cut-offs and disconnects made from this thread: what TSan
// looks at is what passes between it and the engines' threads. (The Python tests have real processes.)
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "digest.hpp"
#include "engine.hpp"

namespace kvlink::testing {

using namespace std::chrono_literals;

inline constexpr std::int64_t kBytes = 8 * 1024 * 1024;
inline constexpr std::int64_t kBlock = 40'000;
inline constexpr EngineLimits kLimits{
    .heartbeat = 20ms, .peer_lost = 5s, .close_timeout = 3s, .renewal_linger = 1s, .max_reads = 64};

// One of `shares` disjoint shares of all blocks, in the opposite order: no two reads that run together may have the
// same blocks.
inline std::shared_ptr<const Plan> blocks(std::int64_t share = 0, std::int64_t shares = 1) {
  Segment segment{{{0, 0, 0, 0}}, {}, {}, kBlock};
  for (std::int64_t i = share; i < kBytes / kBlock; i += shares) {
    segment.pieces.push_back({i * kBlock, (kBytes / kBlock - 1 - i) * kBlock});
  }
  return std::make_shared<const Plan>(std::vector<Segment>{segment});
}

inline std::pair<int, int> sockets() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  return {fds[0], fds[1]};
}

// One engine with its memory, and the completions it has reported.
template <typename AnyEngine, typename Memory = std::vector<std::byte>>
struct End {
  template <typename... Settings>
  explicit End(unsigned char fill, Settings&&... settings)
      : memory(kBytes, static_cast<std::byte>(fill)), engine(std::forward<Settings>(settings)...) {
    engine.register_region(0, reinterpret_cast<std::uintptr_t>(memory.data()), memory.size());
  }

  Completion end_of(std::uint64_t op) {
    for (;;) {
      for (Completion& completion : engine.poll(3)) seen.push_back(std::move(completion));
      for (const Completion& completion : seen) {
        if (completion.op == op) return completion;
      }
      if (!engine.arm()) continue;
      pollfd waiting{engine.fileno(), POLLIN, 0};
      CHECK(poll(&waiting, 1, 30'000) == 1);
    }
  }

  ReadSpec read(AttemptId attempt, std::shared_ptr<const Plan> plan) const {
    return {.peer = "other", .attempt = attempt, .plan = std::move(plan), .integrity = attempt % 2 == 0,
            .chunk_leaves = 4, .max_rereads = 0, .packed = packed};
  }

  bool packed = false;  // how its reads are moved
  Memory memory;
  std::vector<Completion> seen;
  AnyEngine engine;
};

// Rounds of reads, some of them cut off; the last round is whole.
template <typename AnyEnd>
void read_while_calls_come_from_here(AnyEnd& to, AnyEnd& from) {
  constexpr AttemptId kRounds = 3;
  constexpr AttemptId kTogether = 6;
  for (AttemptId round = 0; round < kRounds; ++round) {
    std::vector<std::uint64_t> ops;
    for (AttemptId i = 1; i <= kTogether; ++i) {
      const AttemptId attempt = round * kTogether + i;
      const auto plan = blocks(static_cast<std::int64_t>(i - 1), kTogether);
      from.engine.expose("other", attempt, plan, 5s);
      ops.push_back(to.engine.read(to.read(attempt, plan)));
      CHECK(from.engine.lease("other", attempt).held);
      if (attempt % 3 == 0 && round + 1 < kRounds) ops.push_back(to.engine.cut_off("other", attempt));
    }
    for (const auto op : ops) {
      const auto end = to.end_of(op);
      CHECK(end.outcome == Outcome::ok || end.outcome == Outcome::cut_off);
      if (end.kind == CompletionKind::read && end.outcome == Outcome::ok && end.attempt % 2 == 0) {
        const auto answer = from.engine.withdraw("other", end.attempt);
        CHECK(answer.held && answer.root == end.root);
      }
    }
  }
  std::set<std::uint64_t> ended;
  for (const Completion& completion : to.seen) CHECK(completion.op == 0 || ended.insert(completion.op).second);
}

// Once withdraw() has returned the memory is written, as its owner would: TSan sees a source that still reads it, and a
// read that ended well must not have seen what was written then.
template <typename AnyEnd>
void a_withdrawn_attempt_is_read_no_more(AnyEnd& to, AnyEnd& from) {
  for (AttemptId attempt = 101; attempt <= 120; ++attempt) {
    from.engine.expose("other", attempt, blocks(), 5s);
    const auto op = to.engine.read(to.read(attempt, blocks()));
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (attempt - 101)));
    from.engine.withdraw("other", attempt);
    for (std::byte& byte : from.memory) byte = std::byte{9};
    const auto end = to.end_of(op);
    CHECK(end.outcome == Outcome::ok || end.outcome == Outcome::source_failed);
    if (end.outcome == Outcome::ok) {
      for (std::int64_t i = 0; i < kBytes / kBlock * kBlock; ++i) {
        CHECK(to.memory[static_cast<std::size_t>(i)] == std::byte{2});
      }
    }
    for (std::byte& byte : from.memory) byte = std::byte{2};
  }
}

// After the CUT_OFF the target's owner writes its blocks: nothing else may.
template <typename AnyEnd>
void a_cut_off_attempt_lands_no_more(AnyEnd& to, AnyEnd& from) {
  for (AttemptId attempt = 201; attempt <= 220; ++attempt) {
    from.engine.expose("other", attempt, blocks(), 5s);
    const auto op = to.engine.read(to.read(attempt, blocks()));
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (attempt - 201)));
    to.end_of(to.engine.cut_off("other", attempt));
    for (std::byte& byte : to.memory) byte = std::byte{7};
    CHECK(to.seen.end() != std::find_if(to.seen.begin(), to.seen.end(),
                                        [op](const Completion& completion) { return completion.op == op; }));
    from.engine.withdraw("other", attempt);
    for (const std::byte byte : to.memory) CHECK(byte == std::byte{7});
  }
}

// `to` must have been made with 1, `from` with 2.
template <typename AnyEnd>
void part_and_close(AnyEnd& to, AnyEnd& from) {
  CHECK(to.end_of(to.engine.disconnect("other")).outcome == Outcome::ok);
  while (from.engine.lease("other", 1).held) continue;
  CHECK(to.engine.close());
  CHECK(from.engine.close());
  CHECK(to.engine.close());
  for (std::int64_t i = 0; i < kBytes / kBlock * kBlock; ++i) {
    CHECK(to.memory[static_cast<std::size_t>(i)] == std::byte{2});
  }
}

}  // namespace kvlink::testing
