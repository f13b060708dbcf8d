// What the files of the Python face share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "element.hpp"
#include "plan.hpp"

namespace kvlink {

using Regions = std::vector<std::pair<std::uintptr_t, std::int64_t>>;  // address, length

inline Element element_of(const std::string& name) {
  for (std::size_t i = 0; i < kElements.size(); ++i) {
    if (name == kElements[i].name) return static_cast<Element>(i);
  }
  throw std::invalid_argument("no element type '" + name + "'");
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

void bind_cuda(nanobind::module_& m);
void bind_engines(nanobind::module_& m);
void bind_machine(nanobind::module_& m);

}  // namespace kvlink
