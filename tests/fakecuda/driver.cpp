// The driver functions that KVLink's core uses, for machines without a GPU. It stands in for order, ownership and
// errors; it shows nothing of a GPU's hardware, compiler or speed.
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"
#include "streams.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fakecuda {
namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidImage = 200,
              kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600;
constexpr int kDevices = 2;

struct Module {
  Types types;
};
struct Function {
  Types types;
  std::string name;
};
struct Event {
  std::shared_ptr<Point> point;  // null until recorded
};

std::mutex mutex;
std::array<int, kDevices> retained{};
std::array<char, kDevices> contexts{};  // their addresses are the handles
thread_local std::vector<void*> current;
std::map<Module*, std::vector<std::unique_ptr<Function>>> modules;
std::map<Event*, std::unique_ptr<Event>> events;
std::map<Stream*, std::unique_ptr<Stream>> streams;

// Which call fails, and which does nothing: see fakecuda_fail and fakecuda_skip.
struct Faults {
  std::atomic<long> calls{0};
  std::atomic<long> fail_at{0};
  std::atomic<int> fail_with{0};
  std::string skipped;
  long skip_nth = 0;
  std::map<std::string, long> seen;
  std::vector<const char*> entries;  // called since the last fakecuda_fail
} faults;

// Counts a call. True: it is this call's turn to fail, or the context is lost.
bool fails(const char* name, int* status) {
  {
    const std::lock_guard lock(mutex);
    faults.entries.push_back(name);
  }
  if (++faults.calls == faults.fail_at) {
    *status = faults.fail_with;
    return true;
  }
  *status = lost();
  return *status != 0;
}

bool skipped(const char* name) {
  const std::lock_guard lock(mutex);
  const long nth = ++faults.seen[name];
  return faults.skipped == name && (faults.skip_nth == 0 || faults.skip_nth == nth);
}

// What begins every entry. Calls that give back do so all the same when they fail, as the real ones may.
#define ENTER()                                  \
  if (int status; fails(__func__, &status)) return status; \
  if (skipped(__func__)) return kSuccess
#define ENTER_AND_GIVE_BACK() \
  int status = kSuccess;      \
  static_cast<void>(fails(__func__, &status))
#define NEEDS_CONTEXT() \
  if (current.empty()) return kInvalidContext

Stream* stream_of(Stream* handle) {
  static Stream* const legacy = new Stream;  // stream 0
  const std::lock_guard lock(mutex);
  if (handle == nullptr) return legacy;
  return streams.contains(handle) ? handle : nullptr;
}

Event* event_of(Event* handle) { return events.contains(handle) ? handle : nullptr; }

struct Start {
  Start() {
    const char* seed = std::getenv("FAKECUDA_SEED");
    const char* most = std::getenv("FAKECUDA_MAX_DELAY_US");
    if (most != nullptr) set_delays(seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1, std::atoi(most));
  }
} start;

}  // namespace
}  // namespace fakecuda

using namespace fakecuda;

// --- for tests ------------------------------------------------------------------------------------------------------

EXPORT const int fakecuda_is_no_driver = 1;

// The nth call from now on, of any entry, answers `status`; 0 for none. Counting begins anew.
EXPORT void fakecuda_fail(long nth, int status) {
  const std::lock_guard lock(mutex);
  faults.entries.clear();
  faults.calls = 0;
  faults.fail_with = status;
  faults.fail_at = nth;
}

// The entry of the nth call since; null: there were fewer.
EXPORT const char* fakecuda_called(long nth) {
  const std::lock_guard lock(mutex);
  const auto index = static_cast<std::size_t>(nth) - 1;
  return index < faults.entries.size() ? faults.entries[index] : nullptr;
}

// The nth call of `entry` from now on (every one, for 0) does nothing and answers that all is well.
EXPORT void fakecuda_skip(const char* entry, long nth) {
  const std::lock_guard lock(mutex);
  faults.skipped = entry;
  faults.skip_nth = nth;
  faults.seen.clear();
}

EXPORT void fakecuda_delays(unsigned long seed, unsigned max_microseconds) { set_delays(seed, max_microseconds); }

// Keeps a stream from what is queued after it for so long.
EXPORT void fakecuda_stall(Stream* stream, unsigned milliseconds) {
  stream_of(stream)->push([=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}

// What is held now: contexts, modules, streams, events, device and pinned allocations.
EXPORT void fakecuda_live(int* counts) {
  const std::lock_guard lock(mutex);
  const Counts memory = live_memory();
  counts[0] = retained[0] + retained[1];
  counts[1] = static_cast<int>(modules.size());
  counts[2] = static_cast<int>(streams.size());
  counts[3] = static_cast<int>(events.size());
  counts[4] = memory.device;
  counts[5] = memory.pinned;
}

// Forgets that the context was lost: a new process, as it were.
EXPORT void fakecuda_mend() { mend(); }

// --- the driver -----------------------------------------------------------------------------------------------------

EXPORT int cuInit(unsigned) { ENTER(); return kSuccess; }

EXPORT int cuDriverGetVersion(int* version) {
  ENTER();
  *version = 13000;
  return kSuccess;
}

EXPORT int cuGetErrorName(int status, const char** text) {
  static const std::map<int, const char*> names{
      {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {101, "CUDA_ERROR_INVALID_DEVICE"}, {200, "CUDA_ERROR_INVALID_IMAGE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
      {400, "CUDA_ERROR_INVALID_HANDLE"}, {500, "CUDA_ERROR_NOT_FOUND"}, {600, "CUDA_ERROR_NOT_READY"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {716, "CUDA_ERROR_MISALIGNED_ADDRESS"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}};
  const auto found = names.find(status);
  if (found == names.end()) return kInvalidValue;
  *text = found->second;
  return kSuccess;
}

EXPORT int cuGetErrorString(int status, const char** text) {
  static thread_local std::string words;
  words = "status " + std::to_string(status) + " of the stand-in driver";
  *text = words.c_str();
  return kSuccess;
}

EXPORT int cuDeviceGetCount(int* count) {
  ENTER();
  *count = kDevices;
  return kSuccess;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  ENTER();
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT int cuDeviceGetName(char* name, int bytes, int) {
  ENTER();
  std::snprintf(name, static_cast<std::size_t>(bytes), "stand-in for a GPU");
  return kSuccess;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER();
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 4 : 0;
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER();
  const std::lock_guard lock(mutex);
  ++retained[static_cast<std::size_t>(device)];
  *context = &contexts[static_cast<std::size_t>(device)];
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER_AND_GIVE_BACK();
  const std::lock_guard lock(mutex);
  --retained[static_cast<std::size_t>(device)];
  return status;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  ENTER();
  current.push_back(context);
  return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  ENTER_AND_GIVE_BACK();
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return status;
}

EXPORT int cuModuleLoadData(Module** module, const void* image) {
  ENTER();
  NEEDS_CONTEXT();
  auto loaded = std::make_unique<Module>();
  if (!read_types(image, &loaded->types)) return kInvalidImage;
  *module = loaded.release();
  const std::lock_guard lock(mutex);
  modules[*module];
  return kSuccess;
}

EXPORT int cuModuleUnload(Module* module) {
  ENTER_AND_GIVE_BACK();
  drain_all();
  const std::lock_guard lock(mutex);
  if (modules.erase(module) == 0) return kInvalidHandle;
  delete module;
  return status;
}

EXPORT int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  ENTER();
  NEEDS_CONTEXT();
  const std::lock_guard lock(mutex);
  const auto found = modules.find(module);
  if (found == modules.end()) return kInvalidHandle;
  if (!has_kernel(module->types, name)) return kNotFound;
  found->second.push_back(std::make_unique<Function>(Function{module->types, name}));
  *function = found->second.back().get();
  return kSuccess;
}

EXPORT int cuLaunchKernel(Function* function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned,
                          unsigned, Stream* stream, void** parameters, void**) {
  ENTER();
  NEEDS_CONTEXT();
  Stream* const on = stream_of(stream);
  if (on == nullptr) return kInvalidHandle;
  on->push(launch(function->types, function->name, parameters, grid_x, block_x));
  return kSuccess;
}

EXPORT int cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* argument) {
  ENTER();
  Stream* const on = stream_of(stream);
  if (on == nullptr) return kInvalidHandle;
  on->push([=] {
    if (lost() == 0) function(argument);
  });
  return kSuccess;
}

EXPORT int cuStreamCreate(Stream** stream, unsigned) {
  ENTER();
  NEEDS_CONTEXT();
  auto made = std::make_unique<Stream>();
  *stream = made.get();
  const std::lock_guard lock(mutex);
  streams[*stream] = std::move(made);
  return kSuccess;
}

EXPORT int cuStreamDestroy_v2(Stream* stream) {
  ENTER_AND_GIVE_BACK();
  std::unique_ptr<Stream> ended;  // joined without the lock
  {
    const std::lock_guard lock(mutex);
    const auto found = streams.find(stream);
    if (found == streams.end()) return kInvalidHandle;
    ended = std::move(found->second);
    streams.erase(found);
  }
  ended.reset();
  return status;
}

EXPORT int cuStreamSynchronize(Stream* stream) {
  ENTER();
  Stream* const on = stream_of(stream);
  if (on == nullptr) return kInvalidHandle;
  on->drain();
  return lost();
}

EXPORT int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  ENTER();
  Stream* const on = stream_of(stream);
  const std::lock_guard lock(mutex);
  if (on == nullptr || event_of(event) == nullptr) return kInvalidHandle;
  if (event->point) on->push([point = event->point] { point->wait(); });
  return kSuccess;
}

EXPORT int cuEventCreate(Event** event, unsigned) {
  ENTER();
  NEEDS_CONTEXT();
  auto made = std::make_unique<Event>();
  *event = made.get();
  const std::lock_guard lock(mutex);
  events[*event] = std::move(made);
  return kSuccess;
}

EXPORT int cuEventDestroy_v2(Event* event) {
  ENTER_AND_GIVE_BACK();
  const std::lock_guard lock(mutex);
  return events.erase(event) == 0 ? kInvalidHandle : status;
}

EXPORT int cuEventRecord(Event* event, Stream* stream) {
  ENTER();
  Stream* const on = stream_of(stream);
  const std::lock_guard lock(mutex);
  if (on == nullptr || event_of(event) == nullptr) return kInvalidHandle;
  event->point = std::make_shared<Point>();
  on->push([point = event->point] { point->pass(); });
  return kSuccess;
}

EXPORT int cuEventQuery(Event* event) {
  ENTER();
  const std::lock_guard lock(mutex);
  if (event_of(event) == nullptr) return kInvalidHandle;
  return !event->point || event->point->passed() ? kSuccess : kNotReady;
}

EXPORT int cuEventSynchronize(Event* event) {
  ENTER();
  std::shared_ptr<Point> point;
  {
    const std::lock_guard lock(mutex);
    if (event_of(event) == nullptr) return kInvalidHandle;
    point = event->point;
  }
  if (point) point->wait();
  return lost();
}

EXPORT int cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
  ENTER();
  const std::lock_guard lock(mutex);
  if (event_of(from) == nullptr || event_of(to) == nullptr || !from->point || !to->point) return kInvalidHandle;
  if (!from->point->passed() || !to->point->passed()) return kNotReady;
  *milliseconds = static_cast<float>((to->point->seconds - from->point->seconds) * 1e3);
  return kSuccess;
}

EXPORT int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
  ENTER();
  NEEDS_CONTEXT();
  if (bytes == 0) return kInvalidValue;
  *address = allocate_device(bytes);
  return *address != 0 ? kSuccess : kOutOfMemory;
}

EXPORT int cuMemFree_v2(std::uint64_t address) {
  ENTER_AND_GIVE_BACK();
  drain_all();  // as the real one waits for the device
  return free_device(address) ? status : kInvalidValue;
}

EXPORT int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  ENTER();
  NEEDS_CONTEXT();
  if (bytes == 0) return kInvalidValue;
  *memory = allocate_pinned(bytes);
  return *memory != nullptr ? kSuccess : kOutOfMemory;
}

EXPORT int cuMemFreeHost(void* memory) {
  ENTER_AND_GIVE_BACK();
  drain_all();
  return free_pinned(memory) ? status : kInvalidValue;
}

EXPORT int cuMemcpyHtoDAsync_v2(std::uint64_t target, const void* source, std::size_t bytes, Stream* stream) {
  ENTER();
  NEEDS_CONTEXT();
  Stream* const on = stream_of(stream);
  if (on == nullptr) return kInvalidHandle;
  if (kind_of(reinterpret_cast<std::uintptr_t>(source)) != Kind::unknown) {
    on->push([=] {
      std::memcpy(bytes_at(target, bytes), bytes_at(reinterpret_cast<std::uintptr_t>(source), bytes), bytes);
    });
  } else {  // memory that may move is copied aside before the call returns
    const auto* first = static_cast<const std::byte*>(source);
    on->push([=, aside = std::vector<std::byte>(first, first + bytes)] {
      std::memcpy(bytes_at(target, bytes), aside.data(), bytes);
    });
  }
  return kSuccess;
}

EXPORT int cuMemcpyDtoHAsync_v2(void* target, std::uint64_t source, std::size_t bytes, Stream* stream) {
  ENTER();
  NEEDS_CONTEXT();
  Stream* const on = stream_of(stream);
  if (on == nullptr) return kInvalidHandle;
  on->push([=] { std::memcpy(target, bytes_at(source, bytes), bytes); });
  if (kind_of(reinterpret_cast<std::uintptr_t>(target)) == Kind::unknown) on->drain();
  return lost();
}

EXPORT int cuMemcpyDtoDAsync_v2(std::uint64_t target, std::uint64_t source, std::size_t bytes, Stream* stream) {
  ENTER();
  NEEDS_CONTEXT();
  Stream* const on = stream_of(stream);
  if (on == nullptr) return kInvalidHandle;
  on->push([=] { std::memcpy(bytes_at(target, bytes), bytes_at(source, bytes), bytes); });
  return kSuccess;
}

EXPORT int cuMemsetD8Async(std::uint64_t target, unsigned char value, std::size_t bytes, Stream* stream) {
  ENTER();
  NEEDS_CONTEXT();
  Stream* const on = stream_of(stream);
  if (on == nullptr) return kInvalidHandle;
  on->push([=] { std::memset(bytes_at(target, bytes), value, bytes); });
  return kSuccess;
}

EXPORT int cuPointerGetAttribute(void* value, int attribute, std::uint64_t address) {
  ENTER();
  const Kind kind = kind_of(address);
  if (kind == Kind::unknown) return kInvalidValue;
  if (attribute == 2) {
    *static_cast<unsigned*>(value) = kind == Kind::device ? 2 : 1;
  } else {
    *static_cast<int*>(value) = 0;
  }
  return kSuccess;
}
