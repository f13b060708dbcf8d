// One read of the stream, brought in by several lanes in any order: asked for whole and once, and again where it
// differs.
#include "asked_read.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"

using namespace kvlink;

namespace {

constexpr std::int64_t kTotal = 5 * kMaxAskBytes + 3 * kLeafBytes + 100;

std::shared_ptr<AskedRead> a_read(std::uint32_t chunk_leaves, std::uint32_t max_rereads, std::size_t lanes = 2) {
  auto plan = std::make_shared<const Plan>(std::vector<Segment>{{{{0, 0, 0, 0}}, {{0, 0}}, {}, kTotal}});
  return std::make_shared<AskedRead>(ReadSpec{.peer = "peer", .plan = std::move(plan), .integrity = true,
                                               .chunk_leaves = chunk_leaves, .max_rereads = max_rereads},
                                      nullptr, lanes);
}

std::vector<std::uint64_t> digests(Stretch stretch, std::uint64_t salt = 0) {
  std::vector<std::uint64_t> made;
  for (auto leaf = stretch.begin / kLeafBytes; leaf < leaf_count(stretch.end); ++leaf) {
    made.push_back(static_cast<std::uint64_t>(leaf) * 31 + salt);
  }
  return made;
}

bool land(AskedRead& read, Stretch stretch, std::int64_t bad_leaf = -1) {
  const auto theirs = digests(stretch);
  auto ours = theirs;
  const auto at = bad_leaf - stretch.begin / kLeafBytes;
  if (bad_leaf >= 0 && at >= 0 && at < static_cast<std::int64_t>(ours.size())) ++ours[static_cast<std::size_t>(at)];
  CHECK(read.enter());
  read.landed(stretch, theirs, ours, {});
  return read.exit();
}

void stretches_are_whole_chunks_and_cover_the_plan_once(std::uint32_t chunk_leaves, std::size_t lanes) {
  const auto read = a_read(chunk_leaves, 0, lanes);
  const auto chunk = std::min(chunk_leaves * kLeafBytes, kMaxAskBytes);
  std::vector<Stretch> taken;
  std::int64_t at = 0;
  for (auto left = read->left(); const auto stretch = read->take(); --left) {
    CHECK(left > 0 && stretch->begin == at && stretch->end > at && stretch->end - at <= kMaxAskBytes);
    CHECK(stretch->begin % chunk == 0 && (stretch->end % chunk == 0 || stretch->end == kTotal));
    at = stretch->end;
    taken.push_back(*stretch);
  }
  CHECK(at == kTotal && read->left() == 0 && taken.size() >= lanes);
  std::shuffle(taken.begin(), taken.end(), std::mt19937(7));
  for (std::size_t i = 0; i < taken.size(); ++i) CHECK(land(*read, taken[i]) == (i + 1 == taken.size()));
  const auto end = read->completion();
  CHECK(end.outcome == Outcome::ok && end.bytes_moved == static_cast<std::uint64_t>(kTotal) && end.rereads == 0);
  CHECK(end.root == digest_root(digests({0, kTotal})));
}

void a_chunk_that_differs_is_taken_again_and_only_that() {
  const auto read = a_read(4, 1);
  const std::int64_t bad = 6;  // in the second chunk
  std::vector<Stretch> taken;
  while (const auto stretch = read->take()) taken.push_back(*stretch);
  for (const Stretch stretch : taken) CHECK(!land(*read, stretch, bad));
  const auto again = read->take();
  CHECK(again && again->begin == 4 * kLeafBytes && again->end == 8 * kLeafBytes && !read->take());
  CHECK(land(*read, *again));
  const auto end = read->completion();
  CHECK(end.outcome == Outcome::ok && end.rereads == 1 && end.bad_leaf == 6);
  CHECK(end.bytes_moved == static_cast<std::uint64_t>(kTotal + 4 * kLeafBytes));
}

void rereads_are_bounded_for_each_chunk() {
  const auto read = a_read(1, 2);
  while (const auto stretch = read->take()) land(*read, *stretch, 9);
  CHECK(read->stopped() && read->over());
  const auto end = read->completion();
  CHECK(end.outcome == Outcome::digest_mismatch && end.rereads == 2 && end.bad_leaf == 9 && !end.root);
}

void a_stopped_read_is_over_once_all_have_left_it() {
  const auto read = a_read(64, 0);
  const auto stretch = read->take();
  CHECK(read->enter() && read->enter());
  read->stop(Outcome::cut_off, "");
  CHECK(!read->enter() && !read->take() && read->left() == 0 && !read->over());
  CHECK(!read->exit() && !read->over());
  read->landed(*stretch, digests(*stretch), digests(*stretch), {});
  CHECK(read->exit() && read->over());
  CHECK(read->completion().outcome == Outcome::cut_off);
}

// Lanes share what there is, and a lane that has nothing to wait for always gets something.
void asks_are_shared_between_reads_and_lanes() {
  Demand demand(2);
  CHECK(!demand.take(0));
  const auto first = a_read(64, 0);
  const auto second = a_read(64, 0);
  const std::size_t all = first->left() + second->left();
  demand.add(first);
  demand.add(second);
  const auto one = demand.take(0);
  const auto two = demand.take(1);
  CHECK(one->read == first && two->read == second);
  std::size_t taken = 2;
  while (demand.take(0)) ++taken;
  CHECK(taken == all);
  const auto alone = a_read(64, 0);
  while (alone->left() > 2) CHECK(alone->take());
  demand.add(alone);
  CHECK(!demand.take(1) && demand.take(0) && !demand.take(1) && demand.take(0) && !demand.take(0));
  const auto stopped = a_read(64, 0);
  demand.add(stopped);
  stopped->stop(Outcome::cut_off, "");
  demand.add(first);
  CHECK(!demand.take(0));
}

}  // namespace

int main() {
  for (const std::uint32_t chunk_leaves : {1u, 3u, 4u, 32u, 64u, 4096u}) {
    for (const std::size_t lanes : {1, 2, 5}) stretches_are_whole_chunks_and_cover_the_plan_once(chunk_leaves, lanes);
  }
  a_chunk_that_differs_is_taken_again_and_only_that();
  rereads_are_bounded_for_each_chunk();
  a_stopped_read_is_over_once_all_have_left_it();
  asks_are_shared_between_reads_and_lanes();
}
