// The Python face of the core: with module_cuda.cpp, all that includes nanobind. It converts, checks and releases the
// GIL; it holds no logic. Native code returns data and never calls Python. std::invalid_argument becomes ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
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
#include "shared_engine.hpp"
#include "stream_engine.hpp"
#include "ucx_engine.hpp"
#include "ucx_ping.hpp"
#include "ucx_probe.hpp"
#include "ucx_tuning.hpp"

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

// --- engines --------------------------------------------------------------------------------------------------------

Bytes bytes_from(const nb::bytes& data) {
  const auto* first = reinterpret_cast<const std::byte*>(data.data());
  return Bytes(first, first + data.size());
}

nb::bytes bytes_to(const Bytes& data) { return nb::bytes(reinterpret_cast<const char*>(data.data()), data.size()); }

Duration duration_of(double seconds) {
  // Also false for NaN; the bound keeps the sum with any clock reading inside an int64 of nanoseconds.
  if (!(seconds >= 0 && seconds <= 1e6)) throw std::invalid_argument("a duration must be in 0..1e6 s");
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

using KeyTuple = std::tuple<std::uint64_t, std::uint64_t, nb::bytes>;

KeyTuple key_to(const RemoteKey& key) { return {key.address, key.length, bytes_to(key.packed)}; }

// The engine's thread frees plans, and must not need the interpreter for it: so it gets its own copy.
std::shared_ptr<const Plan> copy_of(const Plan& plan) { return std::make_shared<const Plan>(plan); }

using LeaseTuple = std::pair<bool, std::optional<std::uint64_t>>;
using CompletionTuple = std::tuple<int, std::uint64_t, std::string, std::uint64_t, int, std::uint64_t,
                                   std::optional<std::uint64_t>, std::uint32_t, std::optional<std::uint64_t>, double,
                                   double, std::string, std::string, std::string>;

CompletionTuple completion_to(Completion&& end) {
  return {static_cast<int>(end.kind), end.op,           std::move(end.peer), end.attempt,
          static_cast<int>(end.outcome), end.bytes_moved, end.root,          end.rereads,
          end.bad_leaf,                  end.wire_seconds, end.verify_seconds, std::move(end.detail),
          std::move(end.path),           std::move(end.path_reason)};
}

using LimitSeconds = std::tuple<double, double, double, double>;
constexpr const char* kLimitSeconds = "Seconds: heartbeat, peer lost, close timeout, renewal linger.\n\n";

EngineLimits limits_of(const LimitSeconds& seconds, std::size_t max_reads) {
  return {.heartbeat = duration_of(std::get<0>(seconds)),
          .peer_lost = duration_of(std::get<1>(seconds)),
          .close_timeout = duration_of(std::get<2>(seconds)),
          .renewal_linger = duration_of(std::get<3>(seconds)),
          .max_reads = max_reads};
}

std::uint64_t engine_read(Engine& engine, const std::string& peer, AttemptId attempt, const Plan& plan,
                          bool integrity, std::uint32_t chunk_leaves, std::uint32_t max_rereads, bool packed) {
  if (chunk_leaves == 0) throw std::invalid_argument("chunk_leaves must be positive");
  nb::gil_scoped_release release;
  return engine.read({.peer = peer, .attempt = attempt, .plan = copy_of(plan), .integrity = integrity,
                      .chunk_leaves = chunk_leaves, .max_rereads = max_rereads, .packed = packed});
}

std::vector<CompletionTuple> engine_poll(Engine& engine, std::size_t limit) {
  std::vector<CompletionTuple> tuples;
  for (Completion& end : engine.poll(limit)) tuples.push_back(completion_to(std::move(end)));
  return tuples;
}

// By name, so that a test can hold them to kvlink.transports.base.
std::map<std::string, int> completion_kinds() {
  return {{"CONNECTED", static_cast<int>(CompletionKind::connected)},
          {"DISCONNECTED", static_cast<int>(CompletionKind::disconnected)},
          {"READ", static_cast<int>(CompletionKind::read)},
          {"CUT_OFF", static_cast<int>(CompletionKind::cut_off)},
          {"PEER_LOST", static_cast<int>(CompletionKind::peer_lost)},
          {"LEASE_LAPSED", static_cast<int>(CompletionKind::lease_lapsed)}};
}

std::map<std::string, int> outcomes() {
  return {{"OK", static_cast<int>(Outcome::ok)},
          {"CUT_OFF", static_cast<int>(Outcome::cut_off)},
          {"PEER_LOST", static_cast<int>(Outcome::peer_lost)},
          {"DIGEST_MISMATCH", static_cast<int>(Outcome::digest_mismatch)},
          {"SOURCE_FAILED", static_cast<int>(Outcome::source_failed)},
          {"UNREACHABLE", static_cast<int>(Outcome::unreachable)},
          {"INCOMPATIBLE", static_cast<int>(Outcome::incompatible)},
          {"PROTOCOL", static_cast<int>(Outcome::protocol)},
          {"FAILED", static_cast<int>(Outcome::failed)}};
}

void bind_engine(nb::module_& m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  m.def("completion_kinds", &completion_kinds, "Numbers of kvlink.transports.base.CompletionKind, by name.");
  m.def("outcomes", &outcomes, "Numbers of kvlink.transports.base.Outcome, by name.");
  nb::exception<Unavailable>(m, "Unavailable", PyExc_RuntimeError);
  nb::exception<EngineFull>(m, "EngineFull", PyExc_RuntimeError);
  nb::class_<Engine>(m, "Engine", "What the native transports have in common; see kvlink.transports.engine.")
      .def("late_frames",
           [](const Engine& engine) {
             const auto& late = engine.late();
             return std::make_tuple(late.renewals.load(), late.wants.load(), late.leaves.load(), late.failures.load());
           },
           "Frames for attempts no longer known: renewals, wants, leaves, failures.")
      .def("pace_by", &Engine::pace_by, "pace"_a, "Before the first peer: reads keep to the cap.")
      .def("keep_to", &Engine::keep_to, "cpus"_a, "The threads run on these CPUs only.")
      .def("register", &Engine::register_region, "region"_a, "address"_a, "length"_a, released())
      .def("unregister", &Engine::unregister_region, "region"_a, released())
      .def("disconnect", &Engine::disconnect, "peer"_a)
      .def("expose",
           [](Engine& engine, const std::string& peer, AttemptId attempt, const Plan& plan, double lease_seconds) {
             const auto lease = duration_of(lease_seconds);
             nb::gil_scoped_release release;
             engine.expose(peer, attempt, copy_of(plan), lease);
           },
           "peer"_a, "attempt"_a, "plan"_a, "lease_seconds"_a)
      .def("lease",
           [](Engine& engine, const std::string& peer, AttemptId attempt) -> LeaseTuple {
             const auto answer = engine.lease(peer, attempt);
             return {answer.held, answer.root};
           },
           "peer"_a, "attempt"_a, "Held without a gap, root if computed.")
      .def("withdraw",
           [](Engine& engine, const std::string& peer, AttemptId attempt) -> LeaseTuple {
             nb::gil_scoped_release release;
             const auto answer = engine.withdraw(peer, attempt);
             return {answer.held, answer.root};
           },
           "peer"_a, "attempt"_a, "As `lease`, for the last time.")
      .def("read", &engine_read, "peer"_a, "attempt"_a, "plan"_a, "integrity"_a, "chunk_leaves"_a, "max_rereads"_a,
           "packed"_a = false, "`packed`: the source is to pack the bytes, where the transport can do both.")
      .def("cut_off", &Engine::cut_off, "peer"_a, "attempt"_a)
      .def("forget", &Engine::forget, "peer"_a, "attempt"_a, "Of a read that has ended: renew its lease no longer.")
      .def("poll", &engine_poll, "limit"_a, "Completions as tuples of kvlink.transports.base.Completion's fields.")
      .def("fileno", &Engine::fileno)
      .def("arm", &Engine::arm)
      .def("close", &Engine::close, released(),
           "False if some bytes could not be kept from landing: their memory must not be used again.");
}

// --- ucx ------------------------------------------------------------------------------------------------------------

using StagingBounds = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

void init_ucx(UcxEngine* self, const std::string& libucp, const std::optional<std::string>& tls,
              const LimitSeconds& seconds, std::size_t max_reads, double cut_off_grace_seconds,
              std::uint32_t max_gets_per_read, const StagingBounds& staging, std::shared_ptr<CudaGpu> gpu,
              bool staging_on_gpu) {
  const auto [ring_slots, max_rings, staging_slots] = staging;
  if (ring_slots < 1 || max_rings < 1 || staging_slots < 1) throw std::invalid_argument("slots must be positive");
  UcxSettings settings{.limits = limits_of(seconds, max_reads),
                       .libucp = libucp,
                       .tls = tls,
                       .cut_off_grace = duration_of(cut_off_grace_seconds),
                       .max_gets_per_read = max_gets_per_read,
                       .ring_slots = ring_slots,
                       .max_rings = max_rings,
                       .staging_slots = staging_slots,
                       .gpu = std::move(gpu),
                       .staging_on_gpu = staging_on_gpu};
  nb::gil_scoped_release release;
  new (self) UcxEngine(std::move(settings));
}

void bind_ucx(nb::module_& m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<UcxEngine, Engine>(m, "UcxEngine", "Two UCX workers and their thread; see kvlink.transports.ucx.")
      .def("__init__", &init_ucx, "libucp"_a, "tls"_a.none(), "seconds"_a, "max_reads"_a, "cut_off_grace_seconds"_a,
           "max_gets_per_read"_a, "staging"_a, "gpu"_a = nb::none(), "staging_on_gpu"_a = false,
           (std::string(kLimitSeconds) +
            "`staging` bounds the packed path: slots of one peer's ring, rings, slots that our own gets fill.\n"
            "With `gpu` the regions lie there: only the packed path touches them, by kernels that the caller has "
            "loaded.\n\n"
            "Raises:\n    Unavailable: no UCX to load.\n    RuntimeError: UCX's own word.")
               .c_str())
      .def_prop_ro("ucx_version", [](const UcxEngine& engine) { return engine.context().api().version; })
      .def_prop_ro("ucx_path", [](const UcxEngine& engine) { return engine.context().api().path; })
      .def("transports", [](const UcxEngine& engine) { return engine.context().transports(); }, released(),
           "Names of the transports UCX has here, sorted.")
      .def("address", [](const UcxEngine& engine) { return bytes_to(engine.context().serving().address()); })
      .def("export_key", [](const UcxEngine& engine, std::size_t region) { return key_to(engine.export_key(region)); },
           "region"_a, "Address, length, packed key.")
      .def("connect",
           [](UcxEngine& engine, const std::string& peer, const nb::bytes& address, int channel) {
             return engine.connect(peer, bytes_from(address), channel);
           },
           "peer"_a, "address"_a, "channel"_a, "Takes the descriptor over, whatever happens.")
      .def("import_key",
           [](UcxEngine& engine, const std::string& peer, std::size_t region, std::uint64_t address,
              std::uint64_t length, const nb::bytes& key) {
             engine.import_key(peer, region, {address, length, bytes_from(key)});
           },
           "peer"_a, "region"_a, "address"_a, "length"_a, "key"_a);
}

// --- stream ---------------------------------------------------------------------------------------------------------

void init_stream(StreamEngine* self, const LimitSeconds& seconds, std::size_t max_reads, std::size_t lanes) {
  if (lanes < 1 || lanes > 64) throw std::invalid_argument("lanes must be in 1..64");
  const auto limits = limits_of(seconds, max_reads);
  nb::gil_scoped_release release;
  new (self) StreamEngine(limits, lanes);
}

void bind_stream(nb::module_& m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<StreamEngine, Engine>(m, "StreamEngine", "Stream sockets and their threads; see kvlink.transports.stream.")
      .def("__init__", &init_stream, "seconds"_a, "max_reads"_a, "lanes"_a,
           (std::string(kLimitSeconds) + "`lanes` is the most that a peer has; each has a thread.").c_str())
      .def("region_length", &StreamEngine::region_length, "region"_a)
      .def("import_region", &StreamEngine::import_region, "peer"_a, "region"_a, "length"_a)
      .def("connect", &StreamEngine::connect, "peer"_a, "channel"_a, "lanes"_a, released(),
           "Takes all descriptors over, whatever happens.");
}

// --- shared ---------------------------------------------------------------------------------------------------------

void init_shared(SharedEngine* self, const LimitSeconds& seconds, std::size_t max_reads, std::size_t copy_threads) {
  if (copy_threads > 64) throw std::invalid_argument("copy_threads must be in 0..64");
  const auto limits = limits_of(seconds, max_reads);
  nb::gil_scoped_release release;
  new (self) SharedEngine(limits, copy_threads);
}

void bind_shared(nb::module_& m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<SharedEngine, Engine>(m, "SharedEngine", "Memory shared within a host; see kvlink.transports.shared.")
      .def("__init__", &init_shared, "seconds"_a, "max_reads"_a, "copy_threads"_a,
           (std::string(kLimitSeconds) + "`copy_threads` of them copy beside the engine's own.").c_str())
      .def("register_backed", &SharedEngine::register_backed, "region"_a, "address"_a, "length"_a, "descriptor"_a,
           "offset"_a, released(), "As `register`; peers may map the region, which lies at `offset` of a sealed file.")
      .def("region_length", &SharedEngine::region_length, "region"_a)
      .def("is_backed", &SharedEngine::is_backed, "region"_a)
      .def("import_region", &SharedEngine::import_region, "peer"_a, "region"_a, "length"_a, "mappable"_a)
      .def("connect", &SharedEngine::connect, "peer"_a, "channel"_a, "lane"_a, released(),
           "Takes both descriptors over, whatever happens.");
}

void bind_probe(nb::module_& m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<UcxProbe>(m, "UcxProbe", "A bare loop over UCX gets: the limit that transfers are compared with.")
      .def(nb::init<const std::string&, const std::optional<std::string>&>(), "libucp"_a, "tls"_a.none(), released())
      .def("address", [](const UcxProbe& probe) { return bytes_to(probe.address()); })
      .def("register", &UcxProbe::register_region, "region"_a, "address"_a, "length"_a, released())
      .def("export_key", [](const UcxProbe& probe, std::int64_t region) { return key_to(probe.export_key(region)); },
           "region"_a)
      .def("import_key",
           [](UcxProbe& probe, std::int64_t region, std::uint64_t address, std::uint64_t length, const nb::bytes& key) {
             probe.import_key(region, {address, length, bytes_from(key)});
           },
           "region"_a, "address"_a, "length"_a, "key"_a)
      .def("serve", &UcxProbe::serve)
      .def("connect",
           [](UcxProbe& probe, const nb::bytes& address) { probe.connect(bytes_from(address)); }, "address"_a)
      .def("get", &UcxProbe::get, "plan"_a, "max_run_bytes"_a, "window"_a, released(),
           "Seconds from the first get posted to the last one landed.")
      .def("close", &UcxProbe::close, released());
}

void bind_ping(nb::module_& m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<UcxPing>(m, "UcxPing", "A UCX message there and back, both ends asleep until it comes.")
      .def(nb::init<const std::string&, const std::optional<std::string>&>(), "libucp"_a, "tls"_a.none(), released())
      .def("address", [](const UcxPing& ping) { return bytes_to(ping.address()); })
      .def("serve", &UcxPing::serve)
      .def("connect",
           [](UcxPing& ping, const nb::bytes& address) { ping.connect(bytes_from(address)); }, "address"_a)
      .def("round_trips", &UcxPing::round_trips, "count"_a, released(), "Seconds of each, one after the other.")
      .def("close", &UcxPing::close, released());
  m.def("ucx_tuning", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> table;
    for (const UcxSetting& setting : kUcxTuning) table.emplace_back(setting.name, setting.value, setting.why);
    return table;
  }, "What KVLink sets in UCX unless the environment does: name without UCX_, value, why.");
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
  kvlink::bind_engine(m);
  kvlink::bind_ucx(m);
  kvlink::bind_stream(m);
  kvlink::bind_shared(m);
  kvlink::bind_probe(m);
  kvlink::bind_ping(m);
}
