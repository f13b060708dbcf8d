// Leases and digests shared by two threads. Under TSan, a digest that touched memory after withdraw() would be a race
// with the owner, who writes there at once.
#include "exposures.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

#include "check.hpp"
#include "digest.hpp"

using namespace kvlink;
using namespace std::chrono_literals;

namespace {

constexpr std::int64_t kBytes = 3 * 1024 * 1024 + 5;

std::shared_ptr<const Plan> one_run() {
  return std::make_shared<const Plan>(std::vector<Segment>{{{{0, 0, 0, 0}}, {{0, 0}}, {}, kBytes}});
}

ExposureSpec spec(AttemptId attempt, const std::vector<std::byte>& memory, Duration lease) {
  return {
      .peer = "peer", .attempt = attempt, .plan = one_run(), .regions = {memory.data()}, .keep = {}, .lease = lease};
}

void a_lapse_is_for_good_and_reported_once() {
  const std::vector<std::byte> memory(kBytes);
  Exposures exposures;
  const Time start = Clock::now();
  CHECK(exposures.expose(spec(1, memory, 100ms), start));
  CHECK(!exposures.expose(spec(1, memory, 100ms), start));
  const AttemptId renewed[] = {1, 2};
  CHECK(exposures.renew("peer", renewed, start + 90ms) == 1);  // attempt 2 is unknown
  CHECK(exposures.renew("stranger", renewed, start + 90ms) == 2);
  CHECK(exposures.lease("peer", 1, start + 190ms).held);
  std::vector<Lapse> lapsed;
  CHECK(exposures.sweep(start + 190ms, lapsed) == start + 190ms);
  CHECK(lapsed.empty());
  CHECK(exposures.renew("peer", renewed, start + 191ms) == 1);  // too late
  CHECK(!exposures.lease("peer", 1, start + 191ms).held);
  CHECK(!exposures.lease("peer", 1, start).held);
  exposures.sweep(start + 192ms, lapsed);
  exposures.sweep(start + 193ms, lapsed);
  CHECK(lapsed.size() == 1 && lapsed[0].attempt == 1);
  CHECK(exposures.lapse_all("peer").empty());
  CHECK(exposures.want("peer", 1, start + 193ms).reason == FailReason::lapsed);
  CHECK(!exposures.withdraw("peer", 1, start + 193ms).held);
  CHECK(exposures.size() == 0);
  CHECK(exposures.want("peer", 1, start).reason == FailReason::unknown);
}

void slices_add_up_to_the_digest() {
  std::vector<std::byte> memory(kBytes);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * i >> 7);
  Exposures exposures;
  const Time now = Clock::now();
  exposures.expose(spec(1, memory, 10s), now);
  const auto wanted = exposures.want("peer", 1, now);
  std::vector<std::uint64_t> digests;
  for (bool done = false; !done;) {
    CHECK(!exposures.lease("peer", 1, now).root);
    const auto slice = exposures.digest(*wanted.exposure);
    CHECK(slice.first == digests.size() && slice.digests.size() <= Exposures::kLeavesPerSlice && !slice.reason);
    digests.insert(digests.end(), slice.digests.begin(), slice.digests.end());
    done = slice.done;
  }
  std::vector<std::uint64_t> expected(static_cast<std::size_t>(leaf_count(kBytes)));
  const std::byte* const regions[] = {memory.data()};
  digest_leaves(*one_run(), Side::source, regions, 0, expected);
  CHECK(digests == expected);
  CHECK(exposures.lease("peer", 1, now).root == digest_root(expected));
  bool refused = false;
  try {
    exposures.want("peer", 1, now);
  } catch (const ProtocolViolation&) {
    refused = true;
  }
  CHECK(refused);
}

void no_digest_touches_what_was_withdrawn() {
  std::vector<std::byte> memory(kBytes);
  Exposures exposures;
  std::atomic<AttemptId> exposed{0};
  std::atomic<bool> stop{false};

  std::thread engine([&] {
    AttemptId last = 0;
    std::vector<Lapse> lapsed;
    while (!stop) {
      const AttemptId attempt = exposed;
      if (attempt == last) {
        std::this_thread::yield();
        continue;
      }
      last = attempt;
      const auto wanted = exposures.want("peer", attempt, Clock::now());
      while (wanted.exposure) {
        exposures.renew("peer", {&attempt, 1}, Clock::now());
        exposures.sweep(Clock::now(), lapsed);
        const auto slice = exposures.digest(*wanted.exposure);
        if (slice.done) break;
      }
    }
  });
  for (AttemptId attempt = 1; attempt <= 300; ++attempt) {
    exposures.expose(spec(attempt, memory, 10s), Clock::now());
    exposed = attempt;
    for (std::uint64_t i = 0; i < attempt % 50; ++i) CHECK(exposures.lease("peer", attempt, Clock::now()).held);
    CHECK(exposures.withdraw("peer", attempt, Clock::now()).held);
    std::fill(memory.begin(), memory.end(), static_cast<std::byte>(attempt));
  }
  stop = true;
  engine.join();
}

}  // namespace

int main() {
  a_lapse_is_for_good_and_reported_once();
  slices_add_up_to_the_digest();
  no_digest_touches_what_was_withdrawn();
}
