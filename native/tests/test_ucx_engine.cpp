// Two engines in one process, both reading, with leases, cut-offs and disconnects made from this thread: what TSan
// looks at is what passes between it and the engines' threads. (tests/test_ucx*.py have real processes.)
#include "ucx_engine.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <set>
#include <vector>

#include "check.hpp"
#include "digest.hpp"

using namespace kvlink;
using namespace std::chrono_literals;

namespace {

constexpr std::int64_t kBytes = 8 * 1024 * 1024;

UcxSettings settings() {
  return {.limits = {.heartbeat = 20ms, .peer_lost = 5s, .close_timeout = 3s, .renewal_linger = 1s, .max_reads = 64},
          .libucp = KVLINK_TEST_LIBUCP, .tls = "tcp", .cut_off_grace = 50ms, .max_gets_per_read = 16};
}

std::shared_ptr<const Plan> blocks() {
  constexpr std::int64_t kBlock = 40'000;
  Segment segment{{{0, 0, 0, 0}}, {}, {}, kBlock};
  for (std::int64_t i = 0; i < kBytes / kBlock; ++i) {
    segment.pieces.push_back({i * kBlock, (kBytes / kBlock - 1 - i) * kBlock});
  }
  return std::make_shared<const Plan>(std::vector<Segment>{segment});
}

struct End {
  explicit End(unsigned char fill) : memory(kBytes, static_cast<std::byte>(fill)), engine(settings()) {
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

  ReadSpec read(AttemptId attempt) const {
    return {.peer = "other", .attempt = attempt, .plan = blocks(), .integrity = attempt % 2 == 0, .chunk_leaves = 4,
            .max_rereads = 0};
  }

  std::vector<std::byte> memory;
  std::vector<Completion> seen;
  UcxEngine engine;
};

void join(End& a, End& b) {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  const auto first = a.engine.connect("other", b.engine.context().serving().address(), fds[0]);
  const auto second = b.engine.connect("other", a.engine.context().serving().address(), fds[1]);
  CHECK(a.end_of(first).outcome == Outcome::ok);
  CHECK(b.end_of(second).outcome == Outcome::ok);
  a.engine.import_key("other", 0, b.engine.export_key(0));
  b.engine.import_key("other", 0, a.engine.export_key(0));
}

void both_read_while_calls_come_from_here(End& a, End& b) {
  std::vector<std::uint64_t> ops;
  for (AttemptId attempt = 1; attempt <= 12; ++attempt) {
    b.engine.expose("other", attempt, blocks(), 5s);
    ops.push_back(a.engine.read(a.read(attempt)));
    CHECK(b.engine.lease("other", attempt).held);
    if (attempt % 3 == 0) ops.push_back(a.engine.cut_off("other", attempt));
  }
  for (const auto op : ops) {
    const auto end = a.end_of(op);
    CHECK(end.outcome == Outcome::ok || end.outcome == Outcome::cut_off);
    if (end.kind == CompletionKind::read && end.outcome == Outcome::ok) {
      const auto answer = b.engine.withdraw("other", end.attempt);
      CHECK(answer.held && answer.root == end.root);
    }
  }
  std::set<std::uint64_t> ended;
  for (const Completion& completion : a.seen) CHECK(completion.op == 0 || ended.insert(completion.op).second);
}

}  // namespace

int main() {
  End a(1);
  End b(2);
  join(a, b);
  both_read_while_calls_come_from_here(a, b);
  CHECK(a.end_of(a.engine.disconnect("other")).outcome == Outcome::ok);
  while (b.engine.lease("other", 3).held) continue;
  CHECK(a.engine.close());
  CHECK(b.engine.close());
  CHECK(a.engine.close());
  for (std::int64_t i = 0; i < kBytes / 40'000 * 40'000; ++i) CHECK(a.memory[static_cast<std::size_t>(i)] == std::byte{2});
}
