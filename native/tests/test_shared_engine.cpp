// Two shared engines in one process with a lane between them (see two_engines.hpp): one whose memory the other maps,
// and one that serves a ring. What TSan looks at is what passes between threads of one process; the words in shared
// memory are atomics, and the payload is mapped twice, so that it sees two addresses.
#include "shared_engine.hpp"

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
