// Two shared engines in one process with a lane between them (see two_engines.hpp): pairs that serve each other by
// rings, that map each other's memory, and that pull, with helpers that copy and without. What TSan looks at is what
// passes between threads of one process; the words in shared memory are atomics, what is mapped is mapped twice, so
// that it sees two addresses, and what the kernel reads it does not see.
#include "shared_engine.hpp"

#include <algorithm>
#include <string>

#include "two_engines.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

// Like a vector, in a file that a peer may map.
class SharedVector {
 public:
  SharedVector(std::size_t bytes, std::byte fill) : shared_("kvlink-test", bytes) { std::fill(begin(), end(), fill); }

  std::byte* data() { return shared_.data(); }
  std::size_t size() const { return shared_.bytes(); }
  std::byte* begin() { return data(); }
  std::byte* end() { return data() + size(); }
  std::byte& operator[](std::size_t i) { return data()[i]; }
  int fd() const { return shared_.fd(); }

 private:
  SharedMemory shared_;
};

using PlainEnd = End<SharedEngine>;
using MappedEnd = End<SharedEngine, SharedVector>;

template <typename AnyEnd>
void join(AnyEnd& a, AnyEnd& b, bool mapped) {
  const auto [near, far] = sockets();
  const auto [near_lane, far_lane] = sockets();
  const auto first = a.engine.connect("other", near, near_lane);
  const auto second = b.engine.connect("other", far, far_lane);
  CHECK(a.end_of(first).outcome == Outcome::ok);
  CHECK(b.end_of(second).outcome == Outcome::ok);
  a.engine.import_region("other", 0, kBytes, mapped);
  b.engine.import_region("other", 0, kBytes, mapped);
}

void a_lane_that_cannot_be_is_refused(PlainEnd& end) {
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

void share(MappedEnd& end) {
  end.engine.unregister_region(0);
  end.engine.register_backed(0, reinterpret_cast<std::uintptr_t>(end.memory.data()), end.memory.size(), end.memory.fd(),
                             0);
}

template <typename AnyEnd>
void came_by(const AnyEnd& end, const std::string& path) {
  for (const Completion& completion : end.seen) {
    CHECK(completion.kind != CompletionKind::read || completion.outcome != Outcome::ok || completion.path == path);
  }
}

void over_rings() {
  PlainEnd a(1, kLimits, 0);
  PlainEnd b(2, kLimits, 0);
  a.packed = b.packed = true;
  join(a, b, false);
  a_lane_that_cannot_be_is_refused(a);
  a_withdrawn_attempt_is_read_no_more(a, b);
  a_cut_off_attempt_lands_no_more(a, b);
  read_while_calls_come_from_here(b, a);
  std::fill(b.memory.begin(), b.memory.end(), std::byte{2});
  read_while_calls_come_from_here(a, b);
  came_by(a, "ring");
  part_and_close(a, b);
}

// The source has no say in what is pulled, nor in what is mapped: a withdrawn attempt is found out when its lease is
// asked for at its end.
void pulled(std::size_t copy_threads) {
  PlainEnd a(1, kLimits, copy_threads);
  PlainEnd b(2, kLimits, copy_threads);
  join(a, b, false);
  a_cut_off_attempt_lands_no_more(a, b);
  read_while_calls_come_from_here(b, a);
  std::fill(b.memory.begin(), b.memory.end(), std::byte{2});
  read_while_calls_come_from_here(a, b);
  came_by(a, "pulled");
  part_and_close(a, b);
}

void mapped(std::size_t copy_threads) {
  MappedEnd a(1, kLimits, copy_threads);
  MappedEnd b(2, kLimits, copy_threads);
  share(a);
  share(b);
  join(a, b, true);
  a_cut_off_attempt_lands_no_more(a, b);
  read_while_calls_come_from_here(b, a);
  std::fill(b.memory.begin(), b.memory.end(), std::byte{2});
  read_while_calls_come_from_here(a, b);
  came_by(a, "mapped");
  part_and_close(a, b);
}

// What is mapped of a peer, and what is read from it, is there until the last helper has left a read.
void closed_in_the_middle() {
  for (int round = 0; round < 20; ++round) {
    MappedEnd a(1, kLimits, 2);
    MappedEnd b(2, kLimits, 2);
    share(b);
    join(a, b, true);
    b.engine.expose("other", 1, blocks(), 5s);
    const auto op = a.engine.read(a.read(1, blocks()));
    std::this_thread::sleep_for(std::chrono::microseconds(150 * round));
    if (round % 2 == 0) CHECK(b.engine.close());
    CHECK(a.engine.close());
    std::fill(a.memory.begin(), a.memory.end(), std::byte{7});
    const auto outcome = a.end_of(op).outcome;
    CHECK(outcome == Outcome::ok || outcome == Outcome::cut_off || outcome == Outcome::peer_lost);
    for (const std::byte byte : a.memory) CHECK(byte == std::byte{7});
  }
}

}  // namespace

int main() {
  over_rings();
  pulled(0);
  pulled(2);
  mapped(0);
  mapped(2);
  closed_in_the_middle();
}
