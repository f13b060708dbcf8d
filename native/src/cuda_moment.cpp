#include "cuda_moment.hpp"

#include <unistd.h>

#include <utility>

namespace kvlink {
namespace {

void signal(void* fd) {
  const std::uint64_t one = 1;
  static_cast<void>(write(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)), &one, sizeof one));
}

}  // namespace

CudaMoment::CudaMoment(SharedGpu gpu, std::optional<cuda::Event> event, std::optional<cuda::Stream> stream, int fd)
    : event_(gpu), stream_(std::move(gpu)), fd_(fd) {
  if (event) stream_.wait(*event);
  if (stream) stream_.wait_for_stream(*stream);
  stream_.record(event_);
  stream_.call_when_done(signal, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd_)));
}

}  // namespace kvlink
