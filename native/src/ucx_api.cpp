#include "ucx_api.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <mutex>

namespace kvlink {
namespace {

constexpr const char* kRemedy =
    "; install the wheel libucx-cu12 (or your system's libucx0) or give ucx_origin the path of a libucp.so.0";

std::string loader_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "unknown loader error";
}

std::filesystem::path file_of(const void* symbol, const char* what) {
  Dl_info info{};
  if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) {
    throw Unavailable(std::string("cannot tell which file ") + what + " comes from" + kRemedy);
  }
  std::error_code ignored;
  auto path = std::filesystem::canonical(info.dli_fname, ignored);
  return path.empty() ? std::filesystem::path(info.dli_fname) : path;
}

template <typename Function>
void resolve(void* library, const char* name, Function& slot, const std::string& origin) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) {
    throw Unavailable(origin + " has no " + name + ": KVLink needs UCX 1.13 or newer" + kRemedy);
  }
  slot = reinterpret_cast<Function>(symbol);
}

std::shared_ptr<const UcxApi> open(const std::string& name) {
  // Its siblings come through its RUNPATH or the loader's folders. They cannot be opened one by one before it: libucm
  // and libucs need each other.
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const bool by_path = name.find('/') != std::string::npos;
    throw Unavailable("cannot load " + name + ": " + loader_error() + kRemedy +
                      (by_path ? "; if its sibling libraries are not found, add its folder to LD_LIBRARY_PATH" : ""));
  }

  auto api = std::make_shared<UcxApi>();
#define KVLINK_UCX_RESOLVE(function) resolve(library, #function, api->function, name);
  KVLINK_UCX_FUNCTIONS(KVLINK_UCX_RESOLVE)
#undef KVLINK_UCX_RESOLVE

  const auto ucp = file_of(reinterpret_cast<const void*>(api->ucp_get_version_string), "libucp");
  const auto ucs = file_of(reinterpret_cast<const void*>(api->ucs_status_string), "libucs");
  if (ucp.parent_path() != ucs.parent_path()) {
    throw Unavailable(ucp.string() + " was joined with " + ucs.string() +
                      ", which this process had loaded before: two builds of UCX do not mix; "
                      "load KVLink first, or give ucx_origin the other build's libucp.so.0");
  }
  unsigned patch = 0;
  api->ucp_get_version(&api->major, &api->minor, &patch);
  api->version = api->ucp_get_version_string();
  api->path = ucp.string();
  return api;
}

}  // namespace

std::shared_ptr<const UcxApi> UcxApi::load(const std::string& name) {
  static std::mutex mutex;
  static std::shared_ptr<const UcxApi> loaded;
  static std::string loaded_name;

  const std::lock_guard lock(mutex);
  if (!loaded) {
    loaded = open(name);
    loaded_name = name;
    return loaded;
  }
  std::error_code ignored;
  if (name != loaded_name && std::filesystem::canonical(name, ignored).string() != loaded->path) {
    throw Unavailable("this process already uses UCX " + loaded->version + " from " + loaded->path + ", so " + name +
                      " cannot be loaded beside it; give every link of a process the same ucx_origin");
  }
  return loaded;
}

}  // namespace kvlink
