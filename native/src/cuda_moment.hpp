// A moment of an engine's own GPU work that KVLink has to come after: what has been queued on some stream, or recorded
// in some event, when the engine said so. Each has a stream of its own, so that a late one holds up no other.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda_gpu.hpp"

namespace kvlink {

class CudaMoment {
 public:
  // The event and the stream may be reused or destroyed once this has returned. `fd` is an eventfd that is signalled
  // when the moment has come, and that outlives this.
  CudaMoment(SharedGpu gpu, std::optional<cuda::Event> event, std::optional<cuda::Stream> stream, int fd);

  // Throws CudaError if the engine's work failed.
  bool passed() const { return event_.done(); }

 private:
  CudaEvent event_;
  CudaStream stream_;  // its destructor waits: the call that signals `fd` has been made
  int fd_;
};

}  // namespace kvlink
