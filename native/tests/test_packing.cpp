// The packed path without a wire: the target asks over one end of a socket pair, the source gathers into a ring over
// the other, and the target scatters straight from the ring. What is asked, answered, spoiled, withdrawn or made up.
#include "pack_pull.hpp"
#include "pack_serve.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>

#include "check.hpp"
#include "moved.hpp"

using namespace kvlink;
using namespace kvlink::testing;
using namespace std::chrono_literals;

namespace {

// Spoils what is gathered, after its digests, so many times. Its scatters wait once, as a device's do.
class FaultyPacker final : public Packer {
 public:
  int spoil = 0;
  bool broken = false;
  bool waits = true;

  std::unique_ptr<PackJob> gather(const PackRange& range, std::span<const std::byte* const> regions,
                                  std::byte* slot) override {
    return std::make_unique<Job>(*this, host_.gather(range, regions, slot), slot);
  }
  std::unique_ptr<PackJob> scatter(const PackRange& range, const std::byte* slot,
                                   std::span<std::byte* const> regions) override {
    if (broken) throw std::runtime_error("no kernel");
    return std::make_unique<Job>(*this, host_.scatter(range, slot, regions), nullptr);
  }

 private:
  struct Job final : PackJob {
    Job(FaultyPacker& own, std::unique_ptr<PackJob> made, std::byte* to)
        : packer(own), job(std::move(made)), slot(to) {}
    Step step() override {
      if (packer.waits && !std::exchange(waited, true)) return Step::waiting;
      const Step step = job->step();
      if (step == Step::done && slot != nullptr && packer.spoil > 0) {
        --packer.spoil;
        slot[5] ^= std::byte{1};
      }
      return step;
    }
    FaultyPacker& packer;
    std::unique_ptr<PackJob> job;
    std::byte* slot;
    bool waited = false;
  };
  HostPacker host_;
};

class MappedPulling final : public Pulling {
 public:
  MappedPulling(Packer& packer, const Slots& ring) : Pulling(packer), ring_(ring) {}
 private:
  void fetch(Pull& pull) override {
    fetched(pull, ring_.at(*pull.slot), true);
  }
  void release(Pull&) override {}
  const Slots& ring_;
};

struct World final : FrameSink {
  static constexpr std::size_t kSlots = 3;

  explicit World(std::uint64_t seed, bool convert = false) : random(seed) {
    RandomPlan drawing;
    drawing.convert = convert;
    drawing.source = Element::bfloat16;
    drawing.target = Element::float8_e4m3;
    for (drawn = random_plan(seed, drawing); Plan(drawn.segments).total_bytes() < 5 * kLeafBytes;) {
      drawn = random_plan(++seed, drawing);
    }
    plan = std::make_shared<const Plan>(drawn.segments);
    source.resize(static_cast<std::size_t>(drawn.source_bytes));
    for (auto& byte : source) byte = static_cast<std::byte>(random());
    target.assign(static_cast<std::size_t>(drawn.target_bytes), std::byte{0x5a});
    expected = target;
    expect(drawn, source.data(), expected.data());
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    near = std::make_unique<Channel>(fds[0]);
    far = std::make_unique<Channel>(fds[1]);
    CHECK(exposures.expose({.peer = "peer", .attempt = 7, .plan = plan, .regions = {source.data()}, .keep = {},
                            .lease = 10s}, Clock::now()));
    pulling.open(kSlots);
  }

  std::shared_ptr<AskedRead> read(bool integrity, std::uint32_t max_rereads = 1) {
    auto made = std::make_shared<AskedRead>(
        ReadSpec{.op = 1, .peer = "peer", .attempt = 7, .plan = plan, .integrity = integrity, .chunk_leaves = 1,
                 .max_rereads = max_rereads, .regions = {target.data()}, .packed = true}, nullptr, 1);
    pulling.add(made);
    return made;
  }
  void turn() {
    pulling.ask(*near);
    far->receive(*this);
    CHECK(far->end().empty());
    serving.step(*far);
    near->receive(*this);
    CHECK(near->end().empty());
    pulling.step();
  }
  void finish(const AskedRead& read) {
    while (!read.over()) turn();
  }

  void on_heartbeat(std::span<const AttemptId>) override {}
  void on_want(AttemptId) override {}
  void on_leaves(AttemptId, std::uint64_t, std::span<const std::uint64_t>) override {}
  void on_failed(AttemptId, FailReason) override {}
  void on_ring_wanted(std::uint64_t) override {}
  void on_ring(const RingOffer&) override {}
  void on_pack(const PackAsk& ask) override { serving.accept(ask); }
  void on_packed(const PackAnswer& answer) override { pulling.packed(answer); }

  Random random;
  RandomPlan drawn;
  std::shared_ptr<const Plan> plan;
  std::vector<std::byte> source, target, expected;
  Exposures exposures;
  FaultyPacker packer;
  HugeMemory memory{kSlots * kSlotBytes};
  Slots ring{memory.data(), kSlots};
  PackServing serving{exposures, packer, "peer", ring};
  MappedPulling pulling{packer, ring};
  std::unique_ptr<Channel> near, far;
};

void all_bytes_arrive_in_few_slots() {
  for (std::uint64_t seed = 1; seed < 40; ++seed) {
    World world(seed, seed % 2 == 0);
    const auto read = world.read(seed % 3 != 0);
    world.finish(*read);
    const auto end = read->completion();
    CHECK(end.outcome == Outcome::ok && world.target == world.expected);
    CHECK(world.exposures.lease("peer", 7, Clock::now()).root == end.root);
  }
}

void spoiled_slots_are_packed_again_within_bounds() {
  World world(1);
  world.packer.spoil = 1;
  auto read = world.read(true);
  world.finish(*read);
  CHECK(read->completion().outcome == Outcome::ok && read->completion().rereads == 1);
  CHECK(world.target == world.expected);
  world.packer.spoil = 1000;
  read = world.read(true, 0);
  world.finish(*read);
  CHECK(read->completion().outcome == Outcome::digest_mismatch && !read->completion().root);
}

void what_was_withdrawn_is_not_packed() {
  World world(1);
  world.packer.waits = false;  // or withdraw() would wait here for a device that this thread is to look at
  const auto read = world.read(true);
  world.turn();
  world.exposures.withdraw("peer", 7, Clock::now());
  std::fill(world.source.begin(), world.source.end(), std::byte{0});  // the owner's again
  world.finish(*read);
  CHECK(read->completion().outcome == Outcome::source_failed);
}

void a_read_that_was_stopped_lands_nothing_more() {
  World world(1);
  const auto read = world.read(false);
  world.turn();
  read->stop(Outcome::cut_off, "");
  world.finish(*read);
  const auto after = world.target;
  for (int i = 0; i < 20; ++i) world.turn();  // what was asked for is answered, and dropped
  CHECK(world.target == after);
  const auto again = world.read(false);
  world.finish(*again);
  CHECK(again->completion().outcome == Outcome::ok && world.target == world.expected);
}

void a_scatter_that_fails_ends_the_read_alone() {
  World world(1);
  world.packer.broken = true;
  const auto read = world.read(true);
  world.finish(*read);
  CHECK(read->completion().outcome == Outcome::failed && read->completion().detail == "no kernel");
  world.packer.broken = false;
  const auto again = world.read(true);
  world.finish(*again);
  CHECK(again->completion().outcome == Outcome::ok && world.target == world.expected);
}

void refused(const std::function<void()>& call, const char* word) {
  try {
    call();
  } catch (const ProtocolViolation& violation) {
    CHECK(std::string(violation.what()).find(word) != std::string::npos);
    return;
  }
  CHECK(!"a violation");
}

void asks_that_no_peer_makes_are_violations() {
  World world(1);
  const std::int64_t total = world.plan->total_bytes();
  const auto ask = [&world](PackAsk made) { return [&world, made] { world.serving.accept(made); }; };
  refused(ask({7, 0, kLeafBytes, 3, true}), "slot 3 of 3");
  refused(ask({7, 0, kLeafBytes, ~0ull, true}), "of 3");
  refused(ask({7, 5, kLeafBytes, 0, true}), "bytes 5");
  refused(ask({7, -kLeafBytes, kLeafBytes, 0, true}), "pack of bytes");
  refused(ask({7, kLeafBytes, kLeafBytes, 0, true}), "pack of bytes");
  refused(ask({7, 0, kSlotBytes + kLeafBytes, 0, true}), "pack of bytes");
  refused(ask({7, std::int64_t{1} << 62, std::int64_t{1} << 62 | 1, 0, true}), "pack of bytes");
  refused(ask({7, 0, kLeafBytes - 1, 0, true}), "which has");
  refused(ask({7, total / kLeafBytes * kLeafBytes, total + 1, 0, true}), "which has");
  world.serving.accept({7, 0, kLeafBytes, 1, true});
  refused(ask({7, kLeafBytes, 2 * kLeafBytes, 1, true}), "being packed");
  world.serving.accept({8, 0, kLeafBytes, 2, true});  // of an attempt that is not exposed: answered, not packed
}

void answers_that_nobody_asked_for_are_violations() {
  World world(1);
  const std::vector<std::uint64_t> digests(40);
  const auto answer = [&](PackAnswer made) { return [&world, made] { world.pulling.packed(made); }; };
  refused(answer({7, 0, 0, 0, std::span(digests).first(1)}), "nobody asked");
  const auto read = world.read(true);
  world.pulling.ask(*world.near);
  refused(answer({8, 0, 0, 0, std::span(digests).first(1)}), "another ask");
  refused(answer({7, kLeafBytes, 0, 0, std::span(digests).first(1)}), "another ask");
  refused(answer({7, 0, 1, 0, std::span(digests).first(1)}), "another ask");
  refused(answer({7, 0, 0, 0, {}}), "another ask");
  refused(answer({7, 0, 0, 0, digests}), "another ask");
  refused(answer({7, 0, 0, 2, std::span(digests).first(1)}), "another ask");
  world.pulling.packed({7, 0, 0, 2, {}});
  CHECK(read->completion().outcome == Outcome::source_failed);
}

}  // namespace

int main() {
  all_bytes_arrive_in_few_slots();
  spoiled_slots_are_packed_again_within_bounds();
  what_was_withdrawn_is_not_packed();
  a_read_that_was_stopped_lands_nothing_more();
  a_scatter_that_fails_ends_the_read_alone();
  asks_that_no_peer_makes_are_violations();
  answers_that_nobody_asked_for_are_violations();
}
