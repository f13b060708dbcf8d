// The Python face of what a link asks about its machine, and of the cap that it keeps to.
#include <linux/mempolicy.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <utility>

#include "calibrate.hpp"
#include "module.hpp"
#include "pace.hpp"
#include "shared_pull.hpp"
#include "wait_awake.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvlink {
namespace {

// By system call: the C library does not wrap it, and libnuma is one more thing to install.
int memory_node(std::uintptr_t address) {
  int node = -1;
  const long result = syscall(SYS_get_mempolicy, &node, nullptr, 0UL, address, MPOL_F_NODE | MPOL_F_ADDR);
  return result == 0 ? node : -1;
}

std::pair<double, double> py_socket_cost(const Plan& plan, const Regions& source_regions,
                                         const Regions& target_regions) {
  const auto sources = checked_regions<const std::byte>(plan, Side::source, source_regions);
  const auto targets = checked_regions<std::byte>(plan, Side::target, target_regions);
  nb::gil_scoped_release release;
  const SocketCost cost = socket_cost(plan, sources, targets);
  return {cost.send_seconds, cost.receive_seconds};
}

void py_pull(const Plan& plan, const Regions& source_regions, const Regions& target_regions) {
  const auto sources = checked_regions<const std::byte>(plan, Side::source, source_regions);
  const auto targets = checked_regions<std::byte>(plan, Side::target, target_regions);
  std::vector<FarRegion> from;
  for (const auto& [address, length] : source_regions) from.push_back({address, static_cast<std::uint64_t>(length)});
  nb::gil_scoped_release release;
  pull(getpid(), plan, from, targets, 0, plan.total_bytes());
}

int py_wait_awake(const std::vector<int>& descriptors, double seconds) {
  return wait_awake(descriptors, std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
}

}  // namespace

void bind_machine(nb::module_& m) {
  nb::class_<Pace>(m, "Pace", "A bandwidth cap that engines share, in payload bytes.")
      .def(nb::init<double>(), "bytes_per_second"_a);
  m.def("memory_node", &memory_node, "address"_a, nb::call_guard<nb::gil_scoped_release>(),
        "The NUMA node of the page at an address, which is touched for it; -1 where the kernel does not say.");
  m.def(
      "evict",
      [](std::uintptr_t address, std::size_t bytes) { evict(reinterpret_cast<const std::byte*>(address), bytes); },
      "address"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>(), "Drop memory from all caches.");
  m.def("pull", &py_pull, "plan"_a, "source_regions"_a, "target_regions"_a,
        "`move`, but by the call that reads another process's memory, on this process.\n\n"
        "Raises:\n    RuntimeError: the kernel does not allow it.\n    ValueError: the plan leaves a region.");
  m.def("wait_awake", &py_wait_awake, "descriptors"_a, "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
        "The place of the first descriptor that is readable, -1 if none is in time, -2 if another wants this CPU.");
  m.def("socket_cost", &py_socket_cost, "plan"_a, "source_regions"_a, "target_regions"_a,
        "Seconds of sending a plan's source side through a TCP connection of this host with itself, and of receiving\n"
        "into its target side, call by call in one thread.\n\n"
        "Raises:\n    RuntimeError: there is no such connection to be had.");
}

}  // namespace kvlink
