// The Python face of the core: the one file that includes nanobind. It converts, checks and releases the GIL; it holds
// no logic. Native code returns data and never calls Python. std::invalid_argument becomes ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "digest.hpp"
#include "move.hpp"
#include "plan.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvlink {
namespace {

template <ssize_t Columns>
using Table = nb::ndarray<const std::int64_t, nb::shape<-1, Columns>, nb::c_contig, nb::device::cpu>;
using RunTable = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 5>>;
using Buffer = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SegmentTables = std::tuple<Table<4>, Table<2>, Table<3>, std::int64_t>;
using Regions = std::vector<std::pair<std::uintptr_t, std::int64_t>>;  // address, length

// Rows of a table as structs of the same int64 fields.
template <typename Row, ssize_t Columns>
std::vector<Row> rows_of(const Table<Columns>& table) {
  static_assert(sizeof(Row) == Columns * sizeof(std::int64_t));
  std::vector<Row> rows(table.shape(0));
  if (!rows.empty()) std::memcpy(rows.data(), table.data(), rows.size() * sizeof(Row));
  return rows;
}

Side side_of(int side) {
  if (side != 0 && side != 1) throw std::invalid_argument("side must be 0 (source) or 1 (target)");
  return static_cast<Side>(side);
}

// Region addresses, after a check that the plan's side stays inside the regions' lengths.
template <typename Byte>
std::vector<Byte*> checked_regions(const Plan& plan, Side side, const Regions& regions) {
  std::vector<std::int64_t> lengths;
  std::vector<Byte*> bases;
  for (const auto& [address, length] : regions) {
    lengths.push_back(length);
    bases.push_back(reinterpret_cast<Byte*>(address));
  }
  plan.check_bounds(side, lengths);
  return bases;
}

// --- plan -----------------------------------------------------------------------------------------------------------

void init_plan(Plan* self, const std::vector<SegmentTables>& tables) {
  std::vector<Segment> segments;
  segments.reserve(tables.size());
  for (const auto& [bases, pieces, nest, run_bytes] : tables) {
    segments.push_back({rows_of<Base>(bases), rows_of<Piece>(pieces), rows_of<Dim>(nest), run_bytes});
  }
  nb::gil_scoped_release release;
  new (self) Plan(std::move(segments));
}

RunTable plan_runs(const Plan& plan, std::int64_t begin, std::optional<std::int64_t> end,
                   std::optional<std::int64_t> max_run_bytes) {
  auto runs = std::make_unique<std::vector<Run>>();
  {
    nb::gil_scoped_release release;
    Cursor cursor(plan, begin, end.value_or(plan.total_bytes()), Walk::both,
                  max_run_bytes.value_or(std::numeric_limits<std::int64_t>::max()));
    Run run;
    while (cursor.next(run)) runs->push_back(run);
  }
  static_assert(sizeof(Run) == 5 * sizeof(std::int64_t));
  auto* data = reinterpret_cast<std::int64_t*>(runs->data());
  const std::size_t count = runs->size();
  nb::capsule owner(runs.get(), [](void* p) noexcept { delete static_cast<std::vector<Run>*>(p); });
  runs.release();
  return RunTable(data, {count, 5}, owner);
}

void bind_plan(nb::module_& m) {
  m.attr("SOURCE") = static_cast<int>(Side::source);
  m.attr("TARGET") = static_cast<int>(Side::target);
  m.attr("MAX_NEST_DIMS") = kMaxNestDims;
  m.attr("MAX_OFFSET_BYTES") = kMaxOffsetBytes;
  m.attr("MAX_TRANSFER_BYTES") = kMaxTransferBytes;
  m.attr("MAX_REGIONS") = kMaxRegions;

  nb::class_<Plan>(m, "Plan", "A validated copy plan, walked in wire order. Immutable; any thread may use it.")
      .def("__init__", &init_plan, "segments"_a,
           "Each segment is (bases [P, 4], pieces [N, 2], nest [K, 3], run_bytes), tables of int64.\n\n"
           "Raises:\n    ValueError: a term is out of its bounds; the message names the segment.")
      .def_prop_ro("total_bytes", &Plan::total_bytes)
      .def(
          "check_bounds",
          [](const Plan& plan, int side, const std::vector<std::int64_t>& region_lengths) {
            plan.check_bounds(side_of(side), region_lengths);
          },
          "side"_a, "region_lengths"_a,
          "Raises:\n    ValueError: a byte of this side (0 source, 1 target) is outside its region.")
      .def("count_runs", &Plan::count_runs, nb::call_guard<nb::gil_scoped_release>(),
           "Maximal runs of the whole plan, with neighbours that touch merged.")
      .def("runs", &plan_runs, "begin"_a = 0, "end"_a = nb::none(), "max_run_bytes"_a = nb::none(),
           "Maximal runs of wire bytes [begin, end), int64 [n, 5]: source region, source offset, target region,\n"
           "target offset, bytes.");
}

// --- digest and move ------------------------------------------------------------------------------------------------

const HashVariant& variant_of(const std::optional<std::string>& name) {
  if (!name) return hash_variants().front();
  for (const HashVariant& variant : hash_variants()) {
    if (*name == variant.name) return variant;
  }
  throw std::invalid_argument("this CPU has no hash variant '" + *name + "'");
}

nb::bytes leaves_as_bytes(const std::vector<std::uint64_t>& leaves) {
  return nb::bytes(reinterpret_cast<const char*>(leaves.data()), leaves.size() * sizeof(std::uint64_t));
}

nb::bytes py_digest_leaves(const Plan& plan, int side, const Regions& regions, std::int64_t first_leaf,
                           std::optional<std::int64_t> count, const std::optional<std::string>& variant_name) {
  const HashVariant& variant = variant_of(variant_name);
  const auto bases = checked_regions<const std::byte>(plan, side_of(side), regions);
  const std::int64_t all = leaf_count(plan.total_bytes());
  // Bounded before it sizes an allocation; digest_leaves checks the range itself.
  if (first_leaf < 0 || first_leaf > all || (count && (*count < 0 || *count > all))) {
    throw std::invalid_argument("first_leaf or count is outside the plan's " + std::to_string(all) + " leaves");
  }
  std::vector<std::uint64_t> leaves(static_cast<std::size_t>(count.value_or(all - first_leaf)));
  {
    nb::gil_scoped_release release;
    digest_leaves(plan, side_of(side), bases, first_leaf, leaves, variant);
  }
  return leaves_as_bytes(leaves);
}

void bind_digest(nb::module_& m) {
  m.attr("LEAF_BYTES") = kLeafBytes;
  m.def(
      "hash_variants",
      [] {
        std::vector<std::string> names;
        for (const HashVariant& variant : hash_variants()) names.emplace_back(variant.name);
        return names;
      },
      "Instruction sets this CPU can hash with, fastest (the default) first.");
  m.def(
      "xxh3_64",
      [](const Buffer& data, const std::optional<std::string>& variant) {
        const auto hash = variant_of(variant).xxh3_64;
        nb::gil_scoped_release release;
        return hash(data.data(), data.size());
      },
      "data"_a, "variant"_a = nb::none(), "XXH3-64, seed 0.",
      // nanobind would say NDArray, though any buffer will do.
      nb::sig("def xxh3_64(data: bytes | bytearray | memoryview, variant: str | None = None) -> int"));
  m.def("digest_leaves", &py_digest_leaves, "plan"_a, "side"_a, "regions"_a, "first_leaf"_a = 0,
        "count"_a = nb::none(), "variant"_a = nb::none(),
        "Leaf digests of one side (0 source, 1 target), 8 little-endian bytes each. Regions are (address, length);\n"
        "they must stay mapped, and at rest, until the call returns.\n\n"
        "Raises:\n    ValueError: the plan leaves a region, or the leaves are outside the plan.");
  m.def(
      "digest_root",
      [](const nb::bytes& leaves) {
        if (leaves.size() % sizeof(std::uint64_t) != 0) {
          throw std::invalid_argument("leaf digests are 8 bytes each, got " + std::to_string(leaves.size()) + " bytes");
        }
        nb::gil_scoped_release release;
        return hash_variants().front().xxh3_64(leaves.data(), leaves.size());
      },
      "leaves"_a, "Root digest over all leaf digests, in order.");
}

void bind_move(nb::module_& m) {
  m.def(
      "move",
      [](const Plan& plan, const Regions& source_regions, const Regions& target_regions, std::int64_t begin,
         std::optional<std::int64_t> end) {
        const auto sources = checked_regions<const std::byte>(plan, Side::source, source_regions);
        const auto targets = checked_regions<std::byte>(plan, Side::target, target_regions);
        nb::gil_scoped_release release;
        copy_range(plan, sources, targets, begin, end.value_or(plan.total_bytes()));
      },
      "plan"_a, "source_regions"_a, "target_regions"_a, "begin"_a = 0, "end"_a = nb::none(),
      "Copy wire bytes [begin, end) between this process's regions, (address, length) each. No run may overlap its\n"
      "own target.\n\n"
      "Raises:\n    ValueError: the plan leaves a region, or the range the plan; nothing was copied.");
}

}  // namespace
}  // namespace kvlink

NB_MODULE(_kvlink, m) {
  m.doc() = "Native core of KVLink.";
  kvlink::bind_plan(m);
  kvlink::bind_digest(m);
  kvlink::bind_move(m);
}
