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
