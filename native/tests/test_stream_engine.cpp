// Two stream engines in one process with three lanes between them (see two_engines.hpp); and what a source must not do:
// read memory after it was withdrawn, in the middle of a frame too.
#include "stream_engine.hpp"

#include <algorithm>
#include <thread>

#include "two_engines.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

constexpr std::size_t kLanes = 3;

using StreamEnd = End<StreamEngine>;

void join(StreamEnd& a, StreamEnd& b) {
  const auto [near, far] = sockets();
  std::vector<int> near_lanes;
  std::vector<int> far_lanes;
  for (std::size_t i = 0; i < kLanes; ++i) {
    const auto [one, other] = sockets();
    near_lanes.push_back(one);
    far_lanes.push_back(other);
  }
  const auto first = a.engine.connect("other", near, near_lanes);
  const auto second = b.engine.connect("other", far, far_lanes);
  CHECK(a.end_of(first).outcome == Outcome::ok);
  CHECK(b.end_of(second).outcome == Outcome::ok);
  a.engine.import_region("other", 0, kBytes);
  b.engine.import_region("other", 0, kBytes);
}

// Once withdraw() has returned the memory is written, as its owner would: TSan sees a sender that still reads it, and a
// read that ended well must not have seen what was written then.
void a_withdrawn_attempt_is_read_no_more(StreamEnd& to, StreamEnd& from) {
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
void a_cut_off_attempt_lands_no_more(StreamEnd& to, StreamEnd& from) {
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

void lanes_that_cannot_be_are_refused(StreamEnd& end) {
  const auto refused = [&end](int channel, const std::vector<int>& lanes) {
    try {
      end.engine.connect("another", channel, lanes);
    } catch (const std::exception&) {
      return true;
    }
    return false;
  };
  const auto [one, two] = sockets();
  CHECK(refused(one, {}));
  CHECK(refused(two, {1 << 30}));
}

}  // namespace

int main() {
  StreamEnd a(1, kLimits, kLanes);
  StreamEnd b(2, kLimits, kLanes);
  join(a, b);
  lanes_that_cannot_be_are_refused(a);
  a_withdrawn_attempt_is_read_no_more(a, b);
  a_cut_off_attempt_lands_no_more(a, b);
  read_while_calls_come_from_here(b, a);
  for (std::byte& byte : b.memory) byte = std::byte{2};
  read_while_calls_come_from_here(a, b);
  part_and_close(a, b);
}
