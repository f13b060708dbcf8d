// The kernels of a module, by entry name, run on the host from the sources that NVRTC compiles.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace fakecuda {

// What a module holds: two of kernels/numbers.hpp's types by name, or neither for copies.
struct Types {
  std::string source;
  std::string target;
};

// Reads a cubin's conversion from its symbols. False: it is no ELF file.
bool read_types(const void* image, Types* types);

bool has_kernel(const Types& types, const std::string& name);

// One launch with its parameters as they are now; called later. Throws IllegalAccess then.
std::function<void()> launch(const Types& types, const std::string& name, void** parameters, unsigned blocks,
                             unsigned threads);

}  // namespace fakecuda
