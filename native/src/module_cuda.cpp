// The Python face of the kernels and of the GPU's rooms. As module.cpp: it converts, checks and releases the GIL, and
// holds no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda_gpu.hpp"
#include "cuda_moment.hpp"
#include "cuda_plan.hpp"
#include "kernel_jobs.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvlink {
namespace {

using released = nb::call_guard<nb::gil_scoped_release>;
using Gpu = std::shared_ptr<CudaGpu>;
using HostBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Names = std::pair<std::string, std::string>;  // of elements: source, target

cuda::Event event_at(std::uintptr_t handle) { return reinterpret_cast<cuda::Event>(handle); }
cuda::Stream stream_at(std::uintptr_t handle) { return reinterpret_cast<cuda::Stream>(handle); }

KernelTypes types_of(const std::optional<Names>& names) {
  if (!names) return {};
  return {element_of(names->first), element_of(names->second)};
}

std::vector<std::optional<Names>> types_needed(const Plan& plan) {
  std::vector<std::optional<Names>> names;
  for (const KernelTypes& types : kernel_types(plan)) {
    if (types.source) {
      names.emplace_back(Names{facts_of(*types.source).name, facts_of(*types.target).name});
    } else {
      names.emplace_back(std::nullopt);
    }
  }
  return names;
}

std::vector<std::int64_t> checked_addresses(const Plan& plan, Side side, const Regions& regions) {
  std::vector<std::int64_t> addresses;
  for (const auto* region : checked_regions<const std::byte>(plan, side, regions)) {
    addresses.push_back(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(region)));
  }
  return addresses;
}

std::unique_ptr<CudaPlan> relayout_of(const CudaStream& stream, const Plan& plan, const Regions& source_regions,
                                      const Regions& target_regions, bool in_leaves) {
  return CudaPlan::relayout(stream, plan, checked_addresses(plan, Side::source, source_regions),
                            checked_addresses(plan, Side::target, target_regions), in_leaves);
}

std::unique_ptr<CudaPlan> packed_of(const CudaStream& stream, const Plan& plan, int side, const Regions& regions) {
  if (side != 0 && side != 1) throw std::invalid_argument("side must be 0 (source) or 1 (target)");
  const auto packed = static_cast<Side>(side);
  return CudaPlan::packed(stream, plan, packed, checked_addresses(plan, packed, regions));
}

// Ending a moment waits for the engine's work, which may itself need the interpreter (a callback of its stream): it is
// free meanwhile.
class HeldMoment {
 public:
  HeldMoment(Gpu gpu, std::optional<std::uintptr_t> event, std::optional<std::uintptr_t> stream, int fd)
      : moment_(std::make_unique<CudaMoment>(std::move(gpu), event ? std::optional(event_at(*event)) : std::nullopt,
                                             stream ? std::optional(stream_at(*stream)) : std::nullopt, fd)) {}
  ~HeldMoment() {
    const nb::gil_scoped_release release;
    moment_.reset();
  }
  HeldMoment(const HeldMoment&) = delete;
  HeldMoment& operator=(const HeldMoment&) = delete;

  bool passed() const { return moment_->passed(); }

 private:
  std::unique_ptr<CudaMoment> moment_;
};

// --- kernels' jobs --------------------------------------------------------------------------------------------------

template <class Row>
nb::bytes table_bytes(const std::vector<Row>& rows) {
  return nb::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row));
}

nb::bytes place_jobs(PartJobs& part, std::uintptr_t bases, std::uintptr_t pieces, std::uintptr_t source_scales,
                     std::uintptr_t target_factors) {
  part.place({reinterpret_cast<const kernels::Pair*>(bases), reinterpret_cast<const kernels::Pair*>(pieces),
              reinterpret_cast<const float*>(source_scales), reinterpret_cast<const float*>(target_factors)});
  return table_bytes(part.jobs);
}

void bind_kernel_jobs(nb::module_& m) {
  m.attr("JOB_BYTES") = sizeof(kernels::Job);
  nb::class_<PartJobs>(m, "PartJobs", "One segment of a plan as jobs of the kernels, with their tables as bytes.")
      .def_prop_ro("bases", [](const PartJobs& part) { return table_bytes(part.bases); })
      .def_prop_ro("pieces", [](const PartJobs& part) { return table_bytes(part.pieces); })
      .def_prop_ro("source_scales", [](const PartJobs& part) { return table_bytes(part.source_scales); })
      .def_prop_ro("target_factors", [](const PartJobs& part) { return table_bytes(part.target_factors); })
      .def("place", &place_jobs, "bases"_a, "pieces"_a, "source_scales"_a, "target_factors"_a,
           "The jobs' structs, JOB_BYTES each, for tables at these addresses; 0 for a table that is empty.");
  m.def(
      "kernel_jobs",
      [](const Plan& plan, const std::vector<std::int64_t>& sources, const std::vector<std::int64_t>& targets,
         bool digest, std::int64_t max_items, std::optional<int> width) {
        std::vector<std::pair<int, PartJobs>> parts;
        for (std::size_t part = 0; part < plan.parts().size(); ++part) {
          const int elements = width.value_or(item_elements(plan, part, sources, targets, digest));
          parts.emplace_back(elements, part_jobs(plan, part, sources, targets, elements, max_items));
        }
        return parts;
      },
      "plan"_a, "source_addresses"_a, "target_addresses"_a, "digest"_a = false,
      "max_items"_a = kernels::kMaxItems - 1, "elements"_a = nb::none(),
      "For each segment: elements of an item, and the jobs. Addresses are of regions; the caller has checked bounds.\n"
      "`elements` may be given if it divides what would be chosen, so that segments are digested together.\n"
      "\nRaises:\n    ValueError: elements are not at multiples of their size.");
}

// --- a GPU ----------------------------------------------------------------------------------------------------------

void bind_gpu(nb::module_& m) {
  nb::exception<CudaError>(m, "CudaError", PyExc_RuntimeError);
  m.def(
      "cuda_device_of",
      [](const std::string& library, std::uintptr_t address) { return CudaApi::load(library)->device_of(address); },
      "library"_a, "address"_a, released(), "Ordinal of the GPU whose memory this is; -1 for the host's.");
  nb::class_<CudaGpu>(m, "CudaGpu",
                      "One GPU's primary context, held; and the kernels loaded. See kvlink.relayout.cuda.")
      // Owned by a shared_ptr of C++'s own, so that an engine's thread may drop its share without the interpreter.
      .def(nb::new_([](const std::string& library, int ordinal) {
             nb::gil_scoped_release release;
             return std::make_shared<CudaGpu>(CudaApi::load(library), ordinal);
           }),
           "library"_a, "ordinal"_a,
           "Raises:\n    Unavailable: no driver, or no such GPU.\n    CudaError: the driver's own word.")
      .def_prop_ro("ordinal", &CudaGpu::ordinal)
      .def_prop_ro("name", &CudaGpu::name)
      .def_prop_ro("arch", &CudaGpu::arch, "Such as sm_90.")
      .def_prop_ro("driver_version", [](const CudaGpu& gpu) { return gpu.api().version; }, "13000 for CUDA 13.0.")
      .def_prop_ro("stand_in", [](const CudaGpu& gpu) { return gpu.api().stand_in; },
                   "Whether the driver is a library for tests, and no GPU.")
      .def("load",
           [](CudaGpu& gpu, const std::optional<Names>& types, const nb::bytes& image) {
             const KernelTypes wanted = types_of(types);
             const std::span bytes(reinterpret_cast<const std::byte*>(image.data()), image.size());
             nb::gil_scoped_release release;
             gpu.load(wanted, bytes);
           },
           "types"_a.none(), "image"_a, "Kernels of a conversion (source, target), or of copies.")
      .def("loaded", [](const CudaGpu& gpu, const std::optional<Names>& types) { return gpu.loaded(types_of(types)); },
           "types"_a.none());
}

void bind_memory(nb::module_& m) {
  nb::class_<CudaMemory>(m, "CudaMemory", "Memory of a GPU; freed with the object.")
      .def(
          "__init__",
          [](CudaMemory* self, Gpu gpu, std::size_t bytes) { new (self) CudaMemory(std::move(gpu), bytes); }, "gpu"_a,
          "nbytes"_a, released())
      .def_prop_ro("address", &CudaMemory::address)
      .def_prop_ro("nbytes", &CudaMemory::bytes);
  nb::class_<CudaHostMemory>(m, "CudaHostMemory", "Pinned memory of the host; freed with the object.")
      .def("__init__",
           [](CudaHostMemory* self, Gpu gpu, std::size_t bytes) { new (self) CudaHostMemory(std::move(gpu), bytes); },
           "gpu"_a, "nbytes"_a, released())
      .def_prop_ro("address", &CudaHostMemory::address)
      .def_prop_ro("nbytes", &CudaHostMemory::bytes);
}

void bind_streams(nb::module_& m) {
  nb::class_<CudaEvent>(m, "CudaEvent", "A point in a stream's work.")
      .def("__init__", [](CudaEvent* self, Gpu gpu, bool timed) { new (self) CudaEvent(std::move(gpu), timed); },
           "gpu"_a, "timed"_a = false, released())
      .def_prop_ro("handle", [](const CudaEvent& event) { return reinterpret_cast<std::uintptr_t>(event.get()); })
      .def("done", &CudaEvent::done, released())
      .def("synchronize", &CudaEvent::synchronize, released())
      .def("seconds_since", &CudaEvent::seconds_since, "start"_a, released());
  nb::class_<CudaStream>(m, "CudaStream",
                         "A stream that waits for no other unless told to. Handles are CUstream and\n"
                         "CUevent, which are cudaStream_t and cudaEvent_t.")
      .def("__init__", [](CudaStream* self, Gpu gpu) { new (self) CudaStream(std::move(gpu)); }, "gpu"_a, released())
      .def_prop_ro("handle", [](const CudaStream& stream) { return reinterpret_cast<std::uintptr_t>(stream.get()); })
      .def("record", &CudaStream::record, "event"_a, released())
      .def("wait_event", [](const CudaStream& stream, std::uintptr_t event) { stream.wait(event_at(event)); },
           "event"_a, released())
      .def("wait_stream",
           [](const CudaStream& stream, std::uintptr_t other) { stream.wait_for_stream(stream_at(other)); }, "stream"_a,
           released(), "What is queued here from now on comes after all that is queued there now.")
      .def("fence", [](const CudaStream& stream, std::uintptr_t other) { stream.fence(stream_at(other)); }, "stream"_a,
           released(), "What is queued there from now on comes after all that is queued here now.")
      .def("fill", &CudaStream::fill, "address"_a, "value"_a, "nbytes"_a, released())
      .def("copy_to_device",
           [](const CudaStream& stream, std::uint64_t address, const ReadBytes& bytes) {
             const auto* data = bytes.data();
             const std::size_t size = bytes.size();
             nb::gil_scoped_release release;
             stream.copy_to_device(address, data, size);
           },
           "address"_a, "data"_a, "The caller keeps `data` as it is until the stream is done.")
      .def("copy_to_host",
           [](const CudaStream& stream, const HostBytes& bytes, std::uint64_t address) {
             auto* data = bytes.data();
             const std::size_t size = bytes.size();
             nb::gil_scoped_release release;
             stream.copy_to_host(data, address, size);
           },
           "data"_a, "address"_a)
      .def("copy_on_device", &CudaStream::copy_on_device, "target"_a, "source"_a, "nbytes"_a, released())
      .def("synchronize", &CudaStream::synchronize, released());
  nb::class_<HeldMoment>(m, "CudaMoment",
                         "A moment of an engine's own GPU work, and an eventfd that tells when it has come.")
      .def("__init__",
           [](HeldMoment* self, Gpu gpu, std::optional<std::uintptr_t> event, std::optional<std::uintptr_t> stream,
              int fd) { new (self) HeldMoment(std::move(gpu), event, stream, fd); },
           "gpu"_a, "event"_a.none(), "stream"_a.none(), "fd"_a, released())
      .def("passed", &HeldMoment::passed, released());
}

void bind_cuda_plan(nb::module_& m) {
  m.def("kernel_types", &types_needed, "plan"_a,
        "What a plan needs loaded: conversions (source, target), None for copies.");
  nb::class_<CudaPlan>(m, "CudaPlan", "A plan made ready for a GPU; kept until what it launched is done.")
      .def_static("relayout", &relayout_of, "stream"_a, "plan"_a, "source_regions"_a, "target_regions"_a,
                  "in_leaves"_a = false, released(),
                  "From region to region; launched whole unless made in leaves.\n\n"
                  "Raises:\n    ValueError: the plan leaves a region, or elements are not aligned.\n"
                  "    CudaError: kernels are not loaded, or the driver's own word.")
      .def_static("packed", &packed_of, "stream"_a, "plan"_a, "side"_a, "regions"_a, released(),
                  "Between one side's regions (0 source, 1 target) and packed wire bytes. Raises as `relayout`.")
      .def("launch", &CudaPlan::launch, "stream"_a, "begin"_a, "end"_a, "packed"_a = 0, "digests"_a = 0, released(),
           "Wire bytes [begin, end), whole leaves; `packed` is where byte `begin` lies, `digests` receives 8 bytes a\n"
           "leaf. Queued, not waited for.");
}

}  // namespace

void bind_cuda(nb::module_& m) {
  bind_kernel_jobs(m);
  bind_gpu(m);
  bind_memory(m);
  bind_streams(m);
  bind_cuda_plan(m);
}

}  // namespace kvlink
