#include "cuda_api.hpp"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace kvlink {
namespace {

constexpr const char* kRemedy =
    "; install the NVIDIA driver, or give cuda_library (KVLINK_CUDA_LIBRARY) the path of a libcuda.so.1";

// Exported by tests/fakecuda only.
constexpr const char* kStandInSymbol = "fakecuda_is_no_driver";

std::shared_ptr<const CudaApi> open(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw Unavailable("no CUDA driver: " + std::string(why != nullptr ? why : "unknown loader error") + kRemedy);
  }
  auto api = std::make_shared<CudaApi>();
  const auto resolve = [&](const char* symbol, auto& slot) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(handle, symbol));
    if (slot == nullptr) throw Unavailable(library + " has no " + symbol + ": KVLink needs CUDA 11 or newer" + kRemedy);
  };
#define KVLINK_CUDA_RESOLVE(member, symbol, parameters) resolve(symbol, api->member);
  KVLINK_CUDA_FUNCTIONS(KVLINK_CUDA_RESOLVE)
#undef KVLINK_CUDA_RESOLVE
  api->library = library;
  api->stand_in = dlsym(handle, kStandInSymbol) != nullptr;
  const auto start = [&](cuda::Status status, const char* what) {
    if (status != cuda::kSuccess) {
      throw Unavailable("the CUDA driver " + library + " does not start (" + what + ": " + api->text(status) + ")");
    }
  };
  start(api->init(0), "cuInit");
  start(api->driver_version(&api->version), "cuDriverGetVersion");
  return api;
}

}  // namespace

std::shared_ptr<const CudaApi> CudaApi::load(const std::string& library) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const CudaApi>> loaded;  // drivers are never unloaded

  const std::lock_guard lock(mutex);
  auto& api = loaded[library];
  if (!api) api = open(library);
  return api;
}

std::string CudaApi::text(cuda::Status status) const {
  const char* name = nullptr;
  const char* words = nullptr;
  if (error_name(status, &name) != cuda::kSuccess || name == nullptr) return "CUDA status " + std::to_string(status);
  if (error_string(status, &words) != cuda::kSuccess || words == nullptr) return name;
  return std::string(name) + ", " + words;
}

int CudaApi::device_of(std::uint64_t address) const {
  unsigned type = 0;
  const auto status = pointer_attribute(&type, cuda::kPointerMemoryType, address);
  if (status == cuda::kInvalidValue) return -1;  // memory that the driver has not heard of
  check(status, "cuPointerGetAttribute");
  if (type != cuda::kMemoryTypeDevice) return -1;
  int ordinal = -1;
  check(pointer_attribute(&ordinal, cuda::kPointerDeviceOrdinal, address), "cuPointerGetAttribute");
  return ordinal;
}

}  // namespace kvlink
