// The CUDA driver through its C ABI, opened at run time by name: no CUDA at build time, none at import, and a test may
// name a library of its own. Only what is used here is declared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "unavailable.hpp"

namespace kvlink {

// The driver refused a call, or a kernel failed: its own name and words for why.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace cuda {

using Status = int;  // CUresult
using Device = int;
using Address = unsigned long long;  // CUdeviceptr
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;

// Values of cuda.h, which are its ABI.
inline constexpr Status kSuccess = 0;
inline constexpr Status kInvalidValue = 1;
inline constexpr Status kNotReady = 600;
inline constexpr int kMultiprocessorCount = 16;
inline constexpr int kComputeCapabilityMajor = 75;
inline constexpr int kComputeCapabilityMinor = 76;
inline constexpr int kPointerMemoryType = 2;
inline constexpr int kPointerDeviceOrdinal = 9;
inline constexpr unsigned kMemoryTypeDevice = 2;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;

}  // namespace cuda

// Every entry point KVLink uses: member, symbol, parameters. All exist since CUDA 11.
#define KVLINK_CUDA_FUNCTIONS(X)                                                                                    \
  X(init, "cuInit", (unsigned flags))                                                                               \
  X(driver_version, "cuDriverGetVersion", (int* version))                                                           \
  X(error_name, "cuGetErrorName", (cuda::Status status, const char** text))                                         \
  X(error_string, "cuGetErrorString", (cuda::Status status, const char** text))                                     \
  X(device_count, "cuDeviceGetCount", (int* count))                                                                 \
  X(device_get, "cuDeviceGet", (cuda::Device* device, int ordinal))                                                 \
  X(device_name, "cuDeviceGetName", (char* name, int bytes, cuda::Device device))                                   \
  X(device_attribute, "cuDeviceGetAttribute", (int* value, int attribute, cuda::Device device))                     \
  X(context_retain, "cuDevicePrimaryCtxRetain", (cuda::Context* context, cuda::Device device))                      \
  X(context_release, "cuDevicePrimaryCtxRelease_v2", (cuda::Device device))                                         \
  X(context_push, "cuCtxPushCurrent_v2", (cuda::Context context))                                                   \
  X(context_pop, "cuCtxPopCurrent_v2", (cuda::Context* context))                                                    \
  X(module_load, "cuModuleLoadData", (cuda::Module* module, const void* image))                                     \
  X(module_unload, "cuModuleUnload", (cuda::Module module))                                                         \
  X(module_function, "cuModuleGetFunction", (cuda::Function* function, cuda::Module module, const char* name))      \
  X(launch, "cuLaunchKernel",                                                                                       \
    (cuda::Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
     unsigned block_z, unsigned shared_bytes, cuda::Stream stream, void** parameters, void** extra))                \
  X(launch_host, "cuLaunchHostFunc", (cuda::Stream stream, void (*function)(void*), void* argument))                 \
  X(stream_create, "cuStreamCreate", (cuda::Stream* stream, unsigned flags))                                        \
  X(stream_destroy, "cuStreamDestroy_v2", (cuda::Stream stream))                                                    \
  X(stream_synchronize, "cuStreamSynchronize", (cuda::Stream stream))                                               \
  X(stream_wait_event, "cuStreamWaitEvent", (cuda::Stream stream, cuda::Event event, unsigned flags))               \
  X(event_create, "cuEventCreate", (cuda::Event* event, unsigned flags))                                            \
  X(event_destroy, "cuEventDestroy_v2", (cuda::Event event))                                                        \
  X(event_record, "cuEventRecord", (cuda::Event event, cuda::Stream stream))                                        \
  X(event_query, "cuEventQuery", (cuda::Event event))                                                               \
  X(event_synchronize, "cuEventSynchronize", (cuda::Event event))                                                   \
  X(event_elapsed, "cuEventElapsedTime", (float* milliseconds, cuda::Event start, cuda::Event end))                 \
  X(memory_alloc, "cuMemAlloc_v2", (cuda::Address* address, std::size_t bytes))                                     \
  X(memory_free, "cuMemFree_v2", (cuda::Address address))                                                           \
  X(host_alloc, "cuMemHostAlloc", (void** memory, std::size_t bytes, unsigned flags))                               \
  X(host_free, "cuMemFreeHost", (void* memory))                                                                     \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2",                                                                         \
    (cuda::Address target, const void* source, std::size_t bytes, cuda::Stream stream))                             \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2",                                                                           \
    (void* target, cuda::Address source, std::size_t bytes, cuda::Stream stream))                                   \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2",                                                                         \
    (cuda::Address target, cuda::Address source, std::size_t bytes, cuda::Stream stream))                           \
  X(fill, "cuMemsetD8Async", (cuda::Address target, unsigned char value, std::size_t bytes, cuda::Stream stream))     \
  X(pointer_attribute, "cuPointerGetAttribute", (void* value, int attribute, cuda::Address address))

struct CudaApi {
#define KVLINK_CUDA_MEMBER(member, symbol, parameters) cuda::Status(*member) parameters = nullptr;
  KVLINK_CUDA_FUNCTIONS(KVLINK_CUDA_MEMBER)
#undef KVLINK_CUDA_MEMBER

  std::string library;      // the name it was opened by
  int version = 0;          // of CUDA, as the driver has it: 13000 for 13.0
  bool stand_in = false;    // a library for tests: it says so by a symbol that no driver has

  // Opens and initialises the driver; one for each name, for the life of the process.
  // Throws Unavailable: no such library, a driver too old, or one that does not initialise.
  static std::shared_ptr<const CudaApi> load(const std::string& library);

  // Throws CudaError, "what: NAME, the driver's own words", unless all is well.
  void check(cuda::Status status, const char* what) const {
    if (status != cuda::kSuccess) throw CudaError(std::string(what) + ": " + text(status));
  }
  std::string text(cuda::Status status) const;

  // Which device the memory at an address is on; -1 for memory of the host, pinned or not.
  int device_of(std::uint64_t address) const;
};

}  // namespace kvlink
