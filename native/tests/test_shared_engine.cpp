// Two shared engines in one process with a lane between them (see two_engines.hpp): one whose memory the other maps, and
// one that serves a ring. What TSan looks at is what passes between threads of one process; the words in shared memory
// are atomics, and the payload is mapped twice, so that it sees two addresses.
#include "shared_engine.hpp"

#include <algorithm>
#include <thread>

#include "two_engines.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

using SharedEnd = End<SharedEngine>;

void join(SharedEnd& a, SharedEnd& b) {
  const auto [near, far] = sockets();
  const auto [near_lane, far_lane] = sockets();
  const auto first = a.engine.connect("other", near, near_lane);
  const auto second = b.engine.connect("other", far, far_lane);
  CHECK(a.end_of(first).outcome == Outcome::ok);
  CHECK(b.end_of(second).outcome == Outcome::ok);
  a.engine.import_region("other", 0, kBytes, false);
  b.engine.import_region("other", 0, kBytes, false);
}

// Once withdraw() has returned the memory is written, as its owner would: TSan sees a gather that still reads it, and a
// read that ended well must not have seen what was written then.
void a_withdrawn_attempt_is_read_no_more(SharedEnd& to, SharedEnd& from) {
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
void a_cut_off_attempt_lands_no_more(SharedEnd& to, SharedEnd& from) {
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

void a_lane_that_cannot_be_is_refused(SharedEnd& end) {
  const auto [one, two] = sockets();
  bool refused = false;
  try {
    end.engine.connect("another", one, 1 << 30);
  } catch (const std::exception&) {
    refused = true;
  }
  CHECK(refused);
  close(two);
}

}  // namespace

int main() {
  SharedEnd a(1, kLimits);
  SharedEnd b(2, kLimits);
  join(a, b);
  a_lane_that_cannot_be_is_refused(a);
  a_withdrawn_attempt_is_read_no_more(a, b);
  a_cut_off_attempt_lands_no_more(a, b);
  read_while_calls_come_from_here(b, a);
  for (std::byte& byte : b.memory) byte = std::byte{2};
  read_while_calls_come_from_here(a, b);
  part_and_close(a, b);
}
