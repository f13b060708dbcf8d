// The Python face of the engines, and of the bare loops over UCX that they are compared with.
#include <nanobind/nanobind.h>
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
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "module.hpp"
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

void bind_engines(nb::module_& m) {
  bind_engine(m);
  bind_ucx(m);
  bind_stream(m);
  bind_shared(m);
  bind_probe(m);
  bind_ping(m);
}

}  // namespace kvlink
