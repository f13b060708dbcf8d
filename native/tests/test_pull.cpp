// Memory of another process, read by the kernel: what lands is what loops would have written, memory that is not there
// is an error, and a process is only taken for a peer while it is the one that the lane leads to.
#include "shared_pull.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <system_error>
#include <vector>

#include "check.hpp"
#include "digest.hpp"
#include "moved.hpp"
#include "shared_process.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

// --- what lands -----------------------------------------------------------------------------------------------------

int error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

// Runs of any length, in parts, with digests and without; those that convert, too.
void what_is_pulled_is_what_the_loops_write() {
  int converted = 0;
  for (std::uint64_t seed = 0; seed < 144; ++seed) {
    const RandomPlan random = random_moves(seed, 1);
    const Plan plan(random.segments);
    if (plan.converts() && !plan.cuts_no_element()) continue;
    converted += plan.converts();
    Random rng(seed);
    const Sides sides(random, rng);
    const auto& [source, target, expected] = sides;
    const FarRegion from[] = {{static_cast<std::uint64_t>(source.address()), source.size()}};
    const std::byte* const sources[] = {source.data()};
    std::byte* const targets[] = {target.data()};
    const std::int64_t all = leaf_count(plan.total_bytes());
    const std::int64_t cut = std::min(pick(rng, 0, all) * kLeafBytes, plan.total_bytes());
    sides.wipe();
    pull(getpid(), plan, from, targets, cut, plan.total_bytes());
    pull(getpid(), plan, from, targets, 0, cut);
    CHECK(target == expected);
    sides.wipe();
    std::vector<std::uint64_t> leaves(static_cast<std::size_t>(all)), expected_leaves(leaves.size());
    pull(getpid(), plan, from, targets, 0, plan.total_bytes(), leaves);
    digest_leaves(plan, Side::source, sources, 0, expected_leaves);
    CHECK(target == expected);
    CHECK(leaves == expected_leaves);
  }
  CHECK(converted > 10);
}

// More runs than a call takes, and more bytes than the buffer, with runs that divide neither.
void long_plans_take_many_calls() {
  constexpr std::int64_t kRun = 5'000, kRuns = 2'500;
  Segment segment{.bases = {{0, 3, 0, 5}}, .pieces = {}, .nest = {}, .run_bytes = kRun};
  for (std::int64_t i = 0; i < kRuns; ++i) segment.pieces.push_back({i * (kRun + 1), (kRuns - 1 - i) * (kRun + 2)});
  const Plan plan({segment});
  Random rng(5);
  const Memory source(3 + kRuns * (kRun + 1), 1), target(5 + kRuns * (kRun + 2), 9), expected(target.size(), 9);
  source.fill(rng);
  std::memset(expected.data(), 1, expected.size());
  for (const Piece& piece : segment.pieces) {
    std::memcpy(expected.data() + 5 + piece.target_offset, source.data() + 3 + piece.source_offset, kRun);
  }
  const FarRegion from[] = {{static_cast<std::uint64_t>(source.address()), source.size()}};
  std::byte* const targets[] = {target.data()};
  std::memset(target.data(), 1, target.size());
  pull(getpid(), plan, from, targets, 0, plan.total_bytes());
  CHECK(target == expected);
  std::memset(target.data(), 1, target.size());
  std::vector<std::uint64_t> leaves(static_cast<std::size_t>(leaf_count(plan.total_bytes())));
  pull(getpid(), plan, from, targets, 0, plan.total_bytes(), leaves);
  CHECK(target == expected);
}

// A run that begins in memory and ends beyond it, or is nowhere at all.
void memory_that_is_not_there_is_an_error() {
  constexpr std::int64_t kPage = 4096;
  auto* const pages = static_cast<std::byte*>(
      mmap(nullptr, 3 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(mprotect(pages + kPage, kPage, PROT_NONE) == 0);  // unmapped, somebody else could be given it
  const Memory target(3 * kPage, 0);
  std::byte* const targets[] = {target.data()};
  const FarRegion from[] = {{reinterpret_cast<std::uintptr_t>(pages), 3 * kPage}};
  for (const std::int64_t begin : {std::int64_t{100}, kPage}) {
    const Plan plan({{.bases = {{0, begin, 0, 0}}, .pieces = {{0, 0}}, .nest = {}, .run_bytes = 2 * kPage - 100}});
    std::vector<std::uint64_t> leaves(1);
    CHECK(error_of([&] { pull(getpid(), plan, from, targets, 0, plan.total_bytes()); }) == EFAULT);
    CHECK(error_of([&] { pull(getpid(), plan, from, targets, 0, plan.total_bytes(), leaves); }) == EFAULT);
  }
  munmap(pages, 3 * kPage);
}

void a_run_that_leaves_its_region_is_refused() {
  const Memory source(100, 0), target(100, 0);
  std::byte* const targets[] = {target.data()};
  std::memset(target.data(), 3, target.size());
  const Plan plan({{.bases = {{0, 60, 0, 0}}, .pieces = {{0, 0}}, .nest = {}, .run_bytes = 41}});
  const FarRegion shorter[] = {{static_cast<std::uint64_t>(source.address()), 100}};
  CHECK_REFUSED(pull(getpid(), plan, shorter, targets, 0, 41));
  const FarRegion far_shorter[] = {{static_cast<std::uint64_t>(source.address()), 10}};
  CHECK_REFUSED(pull(getpid(), plan, far_shorter, targets, 0, 41));
  CHECK_REFUSED(pull(getpid(), plan, {}, targets, 0, 41));
  CHECK(target.data()[0] == std::byte{3});
}

// --- whose memory it is ---------------------------------------------------------------------------------------------

// A process of its own at the other end of a lane that it has opened itself.
struct Other {
  explicit Other(const std::function<void(int lane)>& be) {
    sockaddr_un name{.sun_family = AF_UNIX, .sun_path = {}};
    std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "kvlink-test-%d-%p", getpid(), static_cast<void*>(this));
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const auto* const address = reinterpret_cast<const sockaddr*>(&name);
    CHECK(bind(listener, address, sizeof name) == 0 && listen(listener, 1) == 0);
    pid = fork();
    if (pid == 0) {
      const int end = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (connect(end, address, sizeof name) != 0) _exit(1);
      be(end);
      _exit(0);
    }
    lane = accept(listener, nullptr, nullptr);
    close(listener);
  }
  ~Other() {
    if (pid > 0) kill(pid, SIGKILL);
    wait();
    close(lane);
  }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;

  void wait() {
    if (pid > 0) waitpid(pid, nullptr, 0);
    pid = 0;
  }
  std::uint64_t hears() const {
    std::uint64_t word = 0;
    CHECK(recv(lane, &word, sizeof word, MSG_WAITALL) == sizeof word);
    return word;
  }

  pid_t pid;
  int lane;
};

void tell(int lane, std::uint64_t word) { [[maybe_unused]] const auto sent = send(lane, &word, sizeof word, 0); }

// Tells of its nonce, then does as it is told: 0 ends it, 1 begins another program.
void be_a_source(int lane) {
  const Nonce nonce;
  tell(lane, nonce.address());
  tell(lane, nonce.value());
  std::uint64_t order = 0;
  if (recv(lane, &order, sizeof order, MSG_WAITALL) == sizeof order && order == 1) {
    execlp("sleep", "sleep", "30", nullptr);
  }
}

void a_process_is_proven_by_what_lies_in_its_memory() {
  Other source(be_a_source);
  const std::uint64_t address = source.hears(), nonce = source.hears();
  PeerProcess known(source.lane), wrong(source.lane), nothing(source.lane), nowhere(source.lane);
  CHECK(!known.proven() && known.refusal().empty() && known.pid() == source.pid);
  known.prove(address, nonce);
  CHECK(known.proven() && known.refusal().empty() && known.is_there());
  wrong.prove(address, nonce ^ 1);
  nothing.prove(address + 8, 0);
  nowhere.prove(16, nonce);
  for (const PeerProcess* other : {&wrong, &nothing, &nowhere}) {
    CHECK(!other->proven() && other->refusal().find("is not the source") != std::string::npos);
  }
  known.forbid();
  CHECK(known.refusal().find("does not let") != std::string::npos);
}

void a_process_that_has_ended_is_not_there() {
  Other source(be_a_source);
  const std::uint64_t address = source.hears(), nonce = source.hears();
  PeerProcess known(source.lane), late(source.lane);
  known.prove(address, nonce);
  CHECK(known.is_there());
  kill(source.pid, SIGKILL);
  while (known.is_there()) continue;  // before it is waited for: its number is not free yet
  late.prove(address, nonce);
  CHECK(!late.proven() && !late.refusal().empty());
  source.wait();
  CHECK(!known.is_there());
  const PeerProcess later(source.lane);
  CHECK(!later.refusal().empty());
}

// The number lives on, the memory does not; the lane ends with the program that had it.
void a_process_that_began_another_program_is_not_there() {
  Other source(be_a_source);
  const std::uint64_t address = source.hears(), nonce = source.hears();
  PeerProcess known(source.lane);
  known.prove(address, nonce);
  CHECK(known.is_there());
  tell(source.lane, 1);
  while (known.is_there()) continue;
  CHECK(kill(source.pid, 0) == 0);
}

void what_a_fork_copied_proves_nothing() {
  const Nonce nonce;
  CHECK(nonce.value() != 0);
  Other copy([&nonce](int lane) {
    tell(lane, nonce.value());
    pause();
  });
  CHECK(copy.hears() == 0);
  PeerProcess process(copy.lane);
  process.prove(nonce.address(), nonce.value());
  CHECK(!process.proven());
}

}  // namespace

int main() {
  what_is_pulled_is_what_the_loops_write();
  long_plans_take_many_calls();
  memory_that_is_not_there_is_an_error();
  a_run_that_leaves_its_region_is_refused();
  a_process_is_proven_by_what_lies_in_its_memory();
  a_process_that_has_ended_is_not_there();
  a_process_that_began_another_program_is_not_there();
  what_a_fork_copied_proves_nothing();
}
