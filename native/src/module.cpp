// The Python face of the core: plans, digests and moving here, the rest in the other module*.cpp; these alone include
// nanobind. It converts, checks and releases the GIL; it holds no logic. Native code returns data and never calls
// Python. std::invalid_argument becomes ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "digest.hpp"
#include "module.hpp"
#include "move.hpp"
#include "plan.hpp"
#include "staging.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvlink {
namespace {

template <ssize_t Columns>
using Table = nb::ndarray<const std::int64_t, nb::shape<-1, Columns>, nb::c_contig, nb::device::cpu>;
using RunTable = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 5>>;
using Buffer = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scales = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// Source and target element, scales of the source, factors of the target, columns, the dimension that walks them.
using ConversionTables =
    std::tuple<std::string, std::string, std::optional<Scales>, std::optional<Scales>, std::int64_t, int>;
using SegmentTables = std::tuple<Table<4>, Table<2>, Table<3>, std::int64_t, std::optional<ConversionTables>>;

// Rows of a table as structs of the same int64 fields.
template <typename Row, ssize_t Columns>
std::vector<Row> rows_of(const Table<Columns>& table) {
  static_assert(sizeof(Row) == Columns * sizeof(std::int64_t));
  std::vector<Row> rows(table.shape(0));
  if (!rows.empty()) std::memcpy(rows.data(), table.data(), rows.size() * sizeof(Row));
  return rows;
}

std::vector<float> scales_of(const std::optional<Scales>& scales) {
  if (!scales) return {};
  return {scales->data(), scales->data() + scales->size()};
}

std::optional<Conversion> conversion_of(const std::optional<ConversionTables>& tables) {
  if (!tables) return std::nullopt;
  const auto& [source, target, source_scales, target_factors, columns, scale_dim] = *tables;
  return Conversion{element_of(source), element_of(target), scales_of(source_scales), scales_of(target_factors),
                    columns,            scale_dim};
}

Side side_of(int side) {
  if (side != 0 && side != 1) throw std::invalid_argument("side must be 0 (source) or 1 (target)");
  return static_cast<Side>(side);
}

// --- plan -----------------------------------------------------------------------------------------------------------

void init_plan(Plan* self, const std::vector<SegmentTables>& tables) {
  std::vector<Segment> segments;
  segments.reserve(tables.size());
  for (const auto& [bases, pieces, nest, run_bytes, convert] : tables) {
    segments.push_back(
        {rows_of<Base>(bases), rows_of<Piece>(pieces), rows_of<Dim>(nest), run_bytes, conversion_of(convert)});
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
  m.def(
      "element_types",
      [] {
        std::vector<std::tuple<std::string, std::int64_t, std::string>> types;
        for (const ElementFacts& facts : kElements) types.emplace_back(facts.name, facts.bytes, facts.kernel_type);
        return types;
      },
      "What a plan may convert: name, bytes, and the type's name in the kernels' sources.");

  nb::class_<Plan>(m, "Plan", "A validated copy plan, walked in wire order. Immutable; any thread may use it.")
      .def("__init__", &init_plan, "segments"_a,
           "Each segment is (bases [P, 4], pieces [N, 2], nest [K, 3], run_bytes, conversion or None), tables of\n"
           "int64. A conversion is (source element, target element, source scales [P, S] or None, target factors\n"
           "[P, S] or None, S, index into nest of the dimension that walks S or -1), scales of float32.\n\n"
           "Raises:\n    ValueError: a term is out of its bounds; the message names the segment.")
      .def_prop_ro("total_bytes", &Plan::total_bytes, "Of the wire, which carries the source's elements.")
      .def_prop_ro("converts", &Plan::converts, "Whether elements change type; the target then has no digests.")
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

template <class Variant>
const Variant& named(std::span<const Variant> variants, const char* kind, const std::optional<std::string>& name) {
  if (!name) return variants.front();
  for (const Variant& variant : variants) {
    if (*name == variant.name) return variant;
  }
  throw std::invalid_argument("this CPU has no " + std::string(kind) + " variant '" + *name + "'");
}

template <class Variant>
std::vector<std::string> names_of(std::span<const Variant> variants) {
  std::vector<std::string> names;
  for (const Variant& variant : variants) names.emplace_back(variant.name);
  return names;
}

const HashVariant& variant_of(const std::optional<std::string>& name) { return named(hash_variants(), "hash", name); }

nb::bytes leaves_as_bytes(const std::vector<std::uint64_t>& leaves) {
  return nb::bytes(reinterpret_cast<const char*>(leaves.data()), leaves.size() * sizeof(std::uint64_t));
}

// How many leaves a call is about. Bounded before it sizes an allocation; the core checks the range itself.
std::size_t leaves_asked(const Plan& plan, std::int64_t first_leaf, std::optional<std::int64_t> count) {
  const std::int64_t all = leaf_count(plan.total_bytes());
  if (first_leaf < 0 || first_leaf > all || (count && (*count < 0 || *count > all))) {
    throw std::invalid_argument("first_leaf or count is outside the plan's " + std::to_string(all) + " leaves");
  }
  return static_cast<std::size_t>(count.value_or(all - first_leaf));
}

nb::bytes py_digest_leaves(const Plan& plan, int side, const Regions& regions, std::int64_t first_leaf,
                           std::optional<std::int64_t> count, const std::optional<std::string>& variant_name) {
  const HashVariant& variant = variant_of(variant_name);
  const auto bases = checked_regions<const std::byte>(plan, side_of(side), regions);
  std::vector<std::uint64_t> leaves(leaves_asked(plan, first_leaf, count));
  {
    nb::gil_scoped_release release;
    digest_leaves(plan, side_of(side), bases, first_leaf, leaves, variant);
  }
  return leaves_as_bytes(leaves);
}

void bind_digest(nb::module_& m) {
  m.attr("LEAF_BYTES") = kLeafBytes;
  m.attr("SLOT_BYTES") = kSlotBytes;
  m.def(
      "hash_variants", [] { return names_of(hash_variants()); },
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

MoveOptions move_options(int threads, const std::optional<std::string>& variant) {
  if (threads < 1) throw std::invalid_argument("threads must be positive");
  return {.threads = threads, .variant = named(move_variants(), "move", variant)};
}

void py_move(const Plan& plan, const Regions& source_regions, const Regions& target_regions, std::int64_t begin,
             std::optional<std::int64_t> end, int threads, const std::optional<std::string>& variant) {
  const auto sources = checked_regions<const std::byte>(plan, Side::source, source_regions);
  const auto targets = checked_regions<std::byte>(plan, Side::target, target_regions);
  const MoveOptions options = move_options(threads, variant);
  nb::gil_scoped_release release;
  move_range(plan, sources, targets, begin, end.value_or(plan.total_bytes()), options);
}

nb::bytes py_move_and_digest(const Plan& plan, const Regions& source_regions, const Regions& target_regions,
                             std::int64_t first_leaf, std::optional<std::int64_t> count, int threads,
                             const std::optional<std::string>& variant) {
  const auto sources = checked_regions<const std::byte>(plan, Side::source, source_regions);
  const auto targets = checked_regions<std::byte>(plan, Side::target, target_regions);
  const MoveOptions options = move_options(threads, variant);
  std::vector<std::uint64_t> leaves(leaves_asked(plan, first_leaf, count));
  {
    nb::gil_scoped_release release;
    move_and_digest(plan, sources, targets, first_leaf, leaves, options);
  }
  return leaves_as_bytes(leaves);
}

void bind_move(nb::module_& m) {
  m.def(
      "move_variants", [] { return names_of(move_variants()); },
      "Instruction sets this CPU can move and convert with, fastest (the default) first.");
  m.def("move", &py_move, "plan"_a, "source_regions"_a, "target_regions"_a, "begin"_a = 0, "end"_a = nb::none(),
        "threads"_a = 1, "variant"_a = nb::none(),
        "Move, and convert where the plan says so, wire bytes [begin, end) between this process's regions,\n"
        "(address, length) each. No run may overlap its own target. An element that the range cuts belongs to the\n"
        "range that has its first byte.\n\n"
        "Raises:\n    ValueError: the plan leaves a region, or the range the plan; nothing was moved.");
  m.def("move_and_digest", &py_move_and_digest, "plan"_a, "source_regions"_a, "target_regions"_a, "first_leaf"_a = 0,
        "count"_a = nb::none(), "threads"_a = 1, "variant"_a = nb::none(),
        "`move` of whole leaves, and the digests of their wire bytes, 8 little-endian bytes each.\n\n"
        "Raises:\n    ValueError: the plan leaves a region, or the leaves are outside the plan; nothing was moved.");
}

nb::bytearray py_gather(const Plan& plan, const Regions& source_regions, std::int64_t begin, std::int64_t end,
                        const std::optional<std::string>& variant) {
  const auto sources = checked_regions<const std::byte>(plan, Side::source, source_regions);
  const MoveOptions options = move_options(1, variant);
  if (begin < 0 || begin > end || end > plan.total_bytes()) {
    throw std::invalid_argument("the range is outside the plan");
  }
  nb::bytearray packed(nullptr, static_cast<std::size_t>(end - begin));
  auto* data = static_cast<std::byte*>(packed.data());
  nb::gil_scoped_release release;
  carry(plan, {.regions = sources}, {.packed = data, .begin = begin}, begin, end, {.variant = options.variant});
  return packed;
}

void py_scatter(const Plan& plan, const Buffer& packed, const Regions& target_regions, std::int64_t begin,
                const std::optional<std::string>& variant) {
  const auto targets = checked_regions<std::byte>(plan, Side::target, target_regions);
  const MoveOptions options = move_options(1, variant);
  nb::gil_scoped_release release;
  const std::int64_t end = begin + static_cast<std::int64_t>(packed.size());
  carry(plan, {.packed = reinterpret_cast<const std::byte*>(packed.data()), .begin = begin}, {.regions = targets},
        begin, end, {.stores = Stores::streamed, .variant = options.variant});
}

nb::bytes py_digest_packed(const Buffer& packed) {
  std::vector<std::uint64_t> leaves(static_cast<std::size_t>(leaf_count(static_cast<std::int64_t>(packed.size()))));
  {
    nb::gil_scoped_release release;
    digest_packed(reinterpret_cast<const std::byte*>(packed.data()), static_cast<std::int64_t>(packed.size()), leaves);
  }
  return leaves_as_bytes(leaves);
}

void bind_packing(nb::module_& m) {
  m.def("gather", &py_gather, "plan"_a, "source_regions"_a, "begin"_a, "end"_a, "variant"_a = nb::none(),
        "Wire bytes [begin, end), copied from this process's source regions, (address, length) each.\n\n"
        "Raises:\n    ValueError: the plan leaves a region, or the range the plan.",
        nb::sig("def gather(plan: Plan, source_regions: list[tuple[int, int]], begin: int, end: int, "
                "variant: str | None = None) -> bytearray"));
  m.def("scatter", &py_scatter, "plan"_a, "packed"_a, "target_regions"_a, "begin"_a, "variant"_a = nb::none(),
        "The reverse: `packed` is the wire's bytes from `begin` on; converts where the plan does.\n\n"
        "Raises:\n    ValueError: the plan leaves a region, the range the plan, or leaves cut elements; nothing was "
        "moved.",
        nb::sig("def scatter(plan: Plan, packed: bytes | bytearray | memoryview, "
                "target_regions: list[tuple[int, int]], begin: int, variant: str | None = None) -> None"));
  m.def("digest_packed", &py_digest_packed, "packed"_a,
        "Leaf digests of wire bytes that lie packed from the first byte of a leaf on.",
        nb::sig("def digest_packed(packed: bytes | bytearray | memoryview) -> bytes"));
}

}  // namespace
}  // namespace kvlink

NB_MODULE(_kvlink, m) {
  m.doc() = "Native core of KVLink.";
  kvlink::bind_plan(m);
  kvlink::bind_digest(m);
  kvlink::bind_move(m);
  kvlink::bind_packing(m);
  kvlink::bind_cuda(m);
  kvlink::bind_machine(m);
  kvlink::bind_engines(m);
}
