#include "cuda_gpu.hpp"

#include <array>
#include <utility>

namespace kvlink {

CudaGpu::CudaGpu(std::shared_ptr<const CudaApi> api, int ordinal) : api_(std::move(api)), ordinal_(ordinal) {
  int count = 0;
  api_->check(api_->device_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw Unavailable("there is no GPU cuda:" + std::to_string(ordinal) + ": the CUDA driver sees " +
                      std::to_string(count) + "; check the device and CUDA_VISIBLE_DEVICES");
  }
  api_->check(api_->device_get(&device_, ordinal), "cuDeviceGet");
  std::array<char, 256> name{};
  api_->check(api_->device_name(name.data(), static_cast<int>(name.size()), device_), "cuDeviceGetName");
  name_ = name.data();
  const auto attribute = [this](int which) {
    int value = 0;
    api_->check(api_->device_attribute(&value, which, device_), "cuDeviceGetAttribute");
    return value;
  };
  arch_ = "sm_" + std::to_string(10 * attribute(cuda::kComputeCapabilityMajor) +
                                 attribute(cuda::kComputeCapabilityMinor));
  multiprocessors_ = static_cast<unsigned>(attribute(cuda::kMultiprocessorCount));
  // Last: nothing after it fails, so the destructor need not have run.
  api_->check(api_->context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

CudaGpu::~CudaGpu() {
  for (const auto& [types, module] : modules_) {
    static_cast<void>(api_->context_push(context_));
    static_cast<void>(api_->module_unload(module));
    cuda::Context ignored = nullptr;
    static_cast<void>(api_->context_pop(&ignored));
  }
  static_cast<void>(api_->context_release(device_));
}

CudaGpu::Current::Current(const CudaGpu& gpu) : api_(gpu.api()) {
  api_.check(api_.context_push(gpu.context_), "cuCtxPushCurrent");
}

CudaGpu::Current::~Current() {
  cuda::Context ignored = nullptr;
  static_cast<void>(api_.context_pop(&ignored));
}

void CudaGpu::load(const KernelTypes& types, std::span<const std::byte> image) {
  const std::lock_guard lock(mutex_);
  if (modules_.contains(types)) return;
  const Current current(*this);
  cuda::Module module = nullptr;
  api_->check(api_->module_load(&module, image.data()), "cuModuleLoadData");
  modules_[types] = module;
}

bool CudaGpu::loaded(const KernelTypes& types) const {
  const std::lock_guard lock(mutex_);
  return modules_.contains(types);
}

cuda::Function CudaGpu::kernel(const KernelTypes& types, const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto module = modules_.find(types);
  if (module == modules_.end()) throw CudaError("no kernels are loaded for this conversion: load them first");
  const Current current(*this);
  cuda::Function function = nullptr;
  api_->check(api_->module_function(&function, module->second, name.c_str()), "cuModuleGetFunction");
  return function;
}

namespace {

// For destructors: gives back even where the context cannot be made current, as far as the driver lets it.
template <class Free>
void give_back(const CudaGpu& gpu, const Free& free) {
  try {
    const CudaGpu::Current current(gpu);
    static_cast<void>(free());
  } catch (const CudaError&) {
    static_cast<void>(free());
  }
}

}  // namespace

CudaMemory::CudaMemory(SharedGpu gpu, std::size_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().memory_alloc(&address_, bytes), "cuMemAlloc");
}

CudaMemory::~CudaMemory() {
  give_back(*gpu_, [this] { return gpu_->api().memory_free(address_); });
}

CudaHostMemory::CudaHostMemory(SharedGpu gpu, std::size_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().host_alloc(&memory_, bytes, cuda::kHostAllocPortable), "cuMemHostAlloc");
}

CudaHostMemory::~CudaHostMemory() {
  give_back(*gpu_, [this] { return gpu_->api().host_free(memory_); });
}

CudaEvent::CudaEvent(SharedGpu gpu, bool timed) : gpu_(std::move(gpu)) {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().event_create(&event_, timed ? 0 : cuda::kEventDisableTiming), "cuEventCreate");
}

CudaEvent::~CudaEvent() {
  give_back(*gpu_, [this] { return gpu_->api().event_destroy(event_); });
}

bool CudaEvent::done() const {
  const CudaGpu::Current current(*gpu_);
  const auto status = gpu_->api().event_query(event_);
  if (status == cuda::kNotReady) return false;
  gpu_->api().check(status, "cuEventQuery");
  return true;
}

void CudaEvent::synchronize() const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().event_synchronize(event_), "cuEventSynchronize");
}

float CudaEvent::seconds_since(const CudaEvent& start) const {
  const CudaGpu::Current current(*gpu_);
  float milliseconds = 0;
  gpu_->api().check(gpu_->api().event_elapsed(&milliseconds, start.event_, event_), "cuEventElapsedTime");
  return milliseconds / 1000;
}

CudaStream::CudaStream(SharedGpu gpu) : gpu_(std::move(gpu)) {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().stream_create(&stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
}

CudaStream::~CudaStream() {
  give_back(*gpu_, [this] {
    static_cast<void>(gpu_->api().stream_synchronize(stream_));
    return gpu_->api().stream_destroy(stream_);
  });
}

void CudaStream::record(const CudaEvent& event) const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().event_record(event.get(), stream_), "cuEventRecord");
}

void CudaStream::wait(cuda::Event event) const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().stream_wait_event(stream_, event, 0), "cuStreamWaitEvent");
}

void CudaStream::wait_for_stream(cuda::Stream other) const {
  const CudaGpu::Current current(*gpu_);
  const CudaEvent now(gpu_);  // a wait that is queued outlives its event
  gpu_->api().check(gpu_->api().event_record(now.get(), other), "cuEventRecord");
  wait(now.get());
}

void CudaStream::fence(cuda::Stream other) const {
  const CudaGpu::Current current(*gpu_);
  const CudaEvent now(gpu_);
  record(now);
  gpu_->api().check(gpu_->api().stream_wait_event(other, now.get(), 0), "cuStreamWaitEvent");
}

void CudaStream::copy_to_device(std::uint64_t target, const void* source, std::size_t bytes) const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().copy_to_device(target, source, bytes, stream_), "cuMemcpyHtoDAsync");
}

void CudaStream::copy_to_host(void* target, std::uint64_t source, std::size_t bytes) const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().copy_to_host(target, source, bytes, stream_), "cuMemcpyDtoHAsync");
}

void CudaStream::copy_on_device(std::uint64_t target, std::uint64_t source, std::size_t bytes) const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().copy_on_device(target, source, bytes, stream_), "cuMemcpyDtoDAsync");
}

void CudaStream::fill(std::uint64_t target, std::uint8_t value, std::size_t bytes) const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().fill(target, value, bytes, stream_), "cuMemsetD8Async");
}

void CudaStream::call_when_done(void (*function)(void*), void* argument) const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().launch_host(stream_, function, argument), "cuLaunchHostFunc");
}

void CudaStream::synchronize() const {
  const CudaGpu::Current current(*gpu_);
  gpu_->api().check(gpu_->api().stream_synchronize(stream_), "cuStreamSynchronize");
}

}  // namespace kvlink
