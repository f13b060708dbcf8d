// Two stream engines in one process with three lanes between them (see two_engines.hpp); and what a source must not do:
// read memory after it was withdrawn, in the middle of a frame too.
#include "stream_engine.hpp"

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

// Runs of 600 bytes on one side, whole blocks on the other: too many for a call, so they are packed at that end.
std::shared_ptr<const Plan> short_runs(Side side) {
  constexpr std::int64_t kRun = 600;
  constexpr std::int64_t kRows = 16;
  const std::int64_t apart = 2 * kRun;
  Segment segment{{{0, 0, 0, 0}}, {}, {}, kRun};
  for (std::int64_t block = 0; block < kBytes / (kRows * apart); ++block) {
    const std::int64_t wide = block * kRows * apart;
    const std::int64_t tight = block * kRows * kRun;
    segment.pieces.push_back(side == Side::source ? Piece{wide, tight} : Piece{tight, wide});
  }
  segment.nest.push_back(side == Side::source ? Dim{kRows, apart, kRun} : Dim{kRows, kRun, apart});
  return std::make_shared<const Plan>(std::vector<Segment>{segment});
}

void short_runs_land_where_they_belong_and_nothing_else_is_touched(StreamEnd& to, StreamEnd& from) {
  for (AttemptId attempt = 301; attempt <= 304; ++attempt) {  // even ones with digests
    const auto plan = short_runs(attempt <= 302 ? Side::source : Side::target);
    for (std::size_t i = 0; i < from.memory.size(); ++i) from.memory[i] = static_cast<std::byte>(i * 7 + i / 251);
    std::vector<std::byte> expected(to.memory.size(), std::byte{0xee});
    std::fill(to.memory.begin(), to.memory.end(), std::byte{0xee});
    Cursor cursor(*plan, 0, plan->total_bytes());
    for (Run run; cursor.next(run);) {
      std::copy_n(from.memory.begin() + run.source_offset, run.bytes, expected.begin() + run.target_offset);
    }
    from.engine.expose("other", attempt, plan, 5s);
    CHECK(to.end_of(to.engine.read(to.read(attempt, plan))).outcome == Outcome::ok);
    from.engine.withdraw("other", attempt);
    CHECK(to.memory == expected);
  }
  std::fill(to.memory.begin(), to.memory.end(), std::byte{1});
  std::fill(from.memory.begin(), from.memory.end(), std::byte{2});
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
  short_runs_land_where_they_belong_and_nothing_else_is_touched(a, b);
  a_withdrawn_attempt_is_read_no_more(a, b);
  a_cut_off_attempt_lands_no_more(a, b);
  read_while_calls_come_from_here(b, a);
  for (std::byte& byte : b.memory) byte = std::byte{2};
  read_while_calls_come_from_here(a, b);
  part_and_close(a, b);
}
