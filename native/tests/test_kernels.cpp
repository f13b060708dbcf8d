// The kernels' one source, run on the host, against the walk by loops, and its digests against those of digest.cpp.
#include "kernels/host.hpp"

#include "check.hpp"
#include "digest.hpp"
#include "kernel_jobs.hpp"
#include "moved.hpp"

using namespace kvlink;
using namespace kvlink::testing;

namespace {

struct Case {
  explicit Case(std::uint64_t seed, std::int64_t align)
      : random(random_moves(seed, align)), plan(random.segments), rng(seed), source(random.source_bytes, 0),
        target(random.target_bytes, 0), expected(random.target_bytes, 0) {
    source.fill(rng);
    std::memset(target.data(), 0x5a, target.size());
    std::memset(expected.data(), 0x5a, expected.size());
    expect(random, source.data(), expected.data());
    if (random.convert) types = kernels::Conversion{random.source, random.target};
  }

  const kernels::Conversion* conversion() const { return types ? &*types : nullptr; }

  PartJobs jobs(std::size_t part, int elements, std::int64_t max_items = kernels::kMaxItems - 1) const {
    const std::int64_t from[] = {source.address()}, to[] = {target.address()};
    PartJobs made = part_jobs(plan, part, from, to, elements, max_items);
    const auto table = [](const std::vector<float>& scales) { return scales.empty() ? nullptr : scales.data(); };
    made.place({made.bases.data(), made.pieces.data(), table(made.source_scales), table(made.target_factors)});
    return made;
  }

  int elements(std::size_t part, bool wire_aligned) const {
    const std::int64_t from[] = {source.address()}, to[] = {target.address()};
    return item_elements(plan, part, from, to, wire_aligned);
  }

  RandomPlan random;
  Plan plan;
  Random rng;
  Memory source, target, expected;
  std::optional<kernels::Conversion> types;
};

void jobs_write_what_the_loops_write() {
  int seen = 0;  // widths, as bits
  for (std::uint64_t seed = 0; seed < 240; ++seed) {
    Case it(seed, std::int64_t{1} << seed % 5 << (seed % 2 ? 2 : 0));
    for (std::size_t part = 0; part < it.plan.parts().size(); ++part) {
      const int elements = it.elements(part, false);
      seen |= elements;
      // Whole, or cut so small that runs, dimensions, pieces and bases are all cut somewhere.
      const std::int64_t most = seed % 3 == 0 ? kernels::kMaxItems - 1 : pick(it.rng, 1, 400);
      for (const kernels::Job& job : it.jobs(part, elements, most).jobs) {
        CHECK(job.items <= most);
        kernels::run_on_host(it.conversion(), elements, job, static_cast<std::uint32_t>(pick(it.rng, 1, 3)), 32);
      }
    }
    CHECK(it.target == it.expected);
  }
  CHECK(seen == 31);
}

void leaves_are_digested_as_they_pass() {
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    Case it(seed, std::int64_t{1} << seed % 5 << (seed % 2 ? 2 : 0));
    int elements = 16;
    for (std::size_t part = 0; part < it.plan.parts().size(); ++part) {
      elements = std::min(elements, it.elements(part, true));
    }
    std::vector<PartJobs> parts;  // keeps the tables
    std::vector<kernels::Job> jobs;
    for (std::size_t part = 0; part < it.plan.parts().size(); ++part) {
      parts.push_back(it.jobs(part, elements, seed % 2 ? kernels::kMaxItems - 1 : 3000));
      jobs.insert(jobs.end(), parts.back().jobs.begin(), parts.back().jobs.end());
    }
    const std::byte* const sources[] = {it.source.data()};
    std::vector<std::uint64_t> expected(static_cast<std::size_t>(leaf_count(it.plan.total_bytes())));
    digest_leaves(it.plan, Side::source, sources, 0, expected);
    std::vector<std::uint64_t> leaves(expected.size());
    kernels::LeafWork work{jobs.data(), leaves.data(), it.plan.total_bytes(), {},
                           static_cast<std::uint32_t>(jobs.size()), 0, static_cast<std::uint32_t>(leaves.size()),
                           static_cast<std::uint32_t>(elements)};
    kernels::digest_on_host<false>(it.conversion(), work, 2, 96);
    CHECK(leaves == expected);
    std::fill(leaves.begin(), leaves.end(), 0);
    kernels::digest_on_host<true>(it.conversion(), work, 3, 256);
    CHECK(leaves == expected);
    CHECK(it.target == it.expected);
  }
}

void a_leaf_of_any_length_has_its_digest() {
  Random random(5);
  const auto leaf = std::make_unique<kernels::Leaf>();
  const Memory data(kLeafBytes, 0);
  data.fill(random);
  for (std::int64_t bytes = 1; bytes <= kLeafBytes; bytes += bytes < 2200 ? 1 : 97) {
    const Segment segment{.bases = {{0, 0, 0, 0}}, .pieces = {{0, 0}}, .nest = {}, .run_bytes = bytes, .convert = {}};
    const Plan plan({segment});
    const std::int64_t address[] = {data.address()};
    PartJobs part = part_jobs(plan, 0, address, address, 1);
    part.place({part.bases.data(), part.pieces.data(), nullptr, nullptr});
    std::uint64_t digest = 0;
    const kernels::LeafWork work{part.jobs.data(), &digest, bytes, {}, 1, 0, 1, 1};
    kernels::hash_leaves<kernels::NoType, kernels::NoType, false>(work, leaf.get(), {0, 1, 0, 64});
    CHECK(digest == hash_variants().front().xxh3_64(data.data(), static_cast<std::size_t>(bytes)));
  }
}

void elements_that_no_kernel_can_load_are_refused() {
  Segment segment{.bases = {{0, 1, 0, 0}}, .pieces = {{0, 0}}, .nest = {}, .run_bytes = 8};
  segment.convert = {.source = Element::float16, .target = Element::float32};
  const Plan plan({segment});
  const std::int64_t address[] = {64};
  CHECK_REFUSED(item_elements(plan, 0, address, address, false));
}

}  // namespace

int main() {
  jobs_write_what_the_loops_write();
  leaves_are_digested_as_they_pass();
  a_leaf_of_any_length_has_its_digest();
  elements_that_no_kernel_can_load_are_refused();
}
