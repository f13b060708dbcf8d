// A read against a pretended wire: gets end in any order, bytes are flipped, digests come late; every end is right.
#include "read_job.hpp"

#include <algorithm>
#include <vector>

#include "check.hpp"
#include "digest.hpp"
#include "random_plans.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

struct World {
  explicit World(std::uint64_t seed) : random(seed), drawn(random_plan(seed)) {
    plan = std::make_shared<const Plan>(drawn.segments);
    source.resize(static_cast<std::size_t>(drawn.source_bytes));
    for (std::byte& byte : source) byte = static_cast<std::byte>(random());
    target.resize(static_cast<std::size_t>(drawn.target_bytes), std::byte{0x5a});
    expected = target;
    walk(drawn.segments, [this](std::int64_t from, std::int64_t to, std::int64_t bytes) {
      std::copy_n(source.begin() + from, bytes, expected.begin() + to);
    });
    leaves.resize(static_cast<std::size_t>(leaf_count(plan->total_bytes())));
    const std::byte* const regions[] = {source.data()};
    digest_leaves(*plan, Side::source, regions, 0, leaves);
  }

  ReadSpec spec(bool integrity, std::uint32_t max_rereads) {
    return {.op = 1, .peer = "peer", .attempt = 2, .plan = plan, .integrity = integrity, .chunk_leaves = 1,
            .max_rereads = max_rereads, .regions = {target.data()}};
  }

  Random random;
  RandomPlan drawn;
  std::shared_ptr<const Plan> plan;
  std::vector<std::byte> source;
  std::vector<std::byte> target;
  std::vector<std::byte> expected;
  std::vector<std::uint64_t> leaves;
};

struct Flight {
  ReadJob::Chunk* chunk;
  Run run;
};

// Posts and ends gets at random until the job is over. `flip(chunk)` says whether to spoil a get.
template <typename Flip>
Completion run_job(World& world, ReadJob& job, bool integrity, Flip flip) {
  std::vector<Flight> flying;
  std::size_t told = 0;
  while (!job.over()) {
    Flight flight{};
    const auto choice = world.random() % 4;
    if (choice == 0 && integrity && told < world.leaves.size()) {
      const std::size_t count = std::min<std::size_t>(1 + world.random() % 3, world.leaves.size() - told);
      job.add_leaves(told, std::span(world.leaves).subspan(told, count));
      told += count;
    } else if (choice == 1) {
      job.verify();
    } else if (choice == 2 && flying.size() < 9 && (flight.chunk = job.next(flight.run)) != nullptr) {
      flying.push_back(flight);
    } else if (!flying.empty()) {
      const std::size_t at = world.random() % flying.size();
      flight = flying[at];
      flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(at));
      const Run& run = flight.run;
      std::copy_n(world.source.begin() + run.source_offset, run.bytes, world.target.begin() + run.target_offset);
      if (flip(*flight.chunk)) world.target[static_cast<std::size_t>(run.target_offset)] ^= std::byte{1};
      job.ended(*flight.chunk, true);
    }
  }
  CHECK(flying.empty() && job.outstanding() == 0);
  return job.completion();
}

void everything_lands(std::uint64_t seed, bool integrity) {
  World world(seed);
  ReadJob job(world.spec(integrity, 0));
  const auto end = run_job(world, job, integrity, [](const ReadJob::Chunk&) { return false; });
  CHECK(end.outcome == Outcome::ok && end.rereads == 0 && !end.bad_leaf);
  CHECK(end.bytes_moved == static_cast<std::uint64_t>(world.plan->total_bytes()));
  CHECK(world.target == world.expected);
  CHECK(end.root == (integrity ? std::optional(digest_root(world.leaves)) : std::nullopt));
}

// Every first reading of every chunk is spoilt; the second is not.
void spoilt_chunks_are_read_again(std::uint64_t seed) {
  World world(seed);
  ReadJob job(world.spec(true, 1));
  const auto end = run_job(world, job, true, [](const ReadJob::Chunk& chunk) { return chunk.rereads == 0; });
  CHECK(end.outcome == Outcome::ok && end.rereads == world.leaves.size() && end.bad_leaf);
  CHECK(end.bytes_moved == 2 * static_cast<std::uint64_t>(world.plan->total_bytes()));
  CHECK(world.target == world.expected);
}

void a_chunk_spoilt_each_time_ends_the_job(std::uint64_t seed) {
  World world(seed);
  const auto bad = static_cast<std::int64_t>(world.random() % world.leaves.size());
  ReadJob job(world.spec(true, 2));
  const auto end = run_job(world, job, true, [bad](const ReadJob::Chunk& chunk) {
    return chunk.begin == bad * kLeafBytes;
  });
  CHECK(end.outcome == Outcome::digest_mismatch && end.rereads == 2 && !end.root);
  CHECK(end.bad_leaf == static_cast<std::uint64_t>(bad));
}

// It ends by its first reason, once nothing is outstanding, and posts nothing more.
void a_stopped_job_waits_for_its_gets(std::uint64_t seed) {
  World world(seed);
  ReadJob job(world.spec(true, 0));
  Run run;
  ReadJob::Chunk* first = job.next(run);
  job.stop(Outcome::cut_off, "first");
  job.stop(Outcome::failed, "second");
  CHECK(!job.over() && job.next(run) == nullptr && !job.verify());
  job.ended(*first, false);
  CHECK(job.over());
  CHECK(job.completion().outcome == Outcome::cut_off && job.completion().detail == "first");
}

void a_broken_get_is_never_taken_for_landed(std::uint64_t seed) {
  World world(seed);
  ReadJob job(world.spec(false, 0));
  Run run;
  std::vector<ReadJob::Chunk*> flying;
  for (ReadJob::Chunk* chunk; flying.size() < 50 && (chunk = job.next(run)) != nullptr;) flying.push_back(chunk);
  for (ReadJob::Chunk* chunk : flying) job.ended(*chunk, chunk != flying.front());
  CHECK(job.broken() && !job.over() && job.next(run) == nullptr);
  job.stop(Outcome::failed, "broke");
  CHECK(job.over() && job.completion().outcome == Outcome::failed);
}

void leaves_that_are_not_the_next_are_a_violation() {
  World world(1);
  const std::vector<std::uint64_t> many(world.leaves.size() + 1);
  const auto refused = [&many](ReadJob& job, std::uint64_t first, std::size_t count) {
    try {
      job.add_leaves(first, std::span(many).first(count));
    } catch (const ProtocolViolation&) {
      return true;
    }
    return false;
  };
  ReadJob job(world.spec(true, 0));
  CHECK(refused(job, 1, 1) && refused(job, ~0ull, 1) && refused(job, 0, many.size()));
  CHECK(!refused(job, 0, many.size() - 1) && refused(job, many.size() - 1, 1));
  ReadJob unchecked(world.spec(false, 0));
  CHECK(refused(unchecked, 0, 1));
}

}  // namespace

int main() {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    everything_lands(seed, seed % 2 == 0);
    spoilt_chunks_are_read_again(seed);
    a_chunk_spoilt_each_time_ends_the_job(seed);
    a_stopped_job_waits_for_its_gets(seed);
    a_broken_get_is_never_taken_for_landed(seed);
  }
  leaves_that_are_not_the_next_are_a_violation();
}
