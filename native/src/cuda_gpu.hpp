// One GPU: its primary context, the kernels loaded into it, and what is owned there (memory, streams, events).
//
// Everything here may be called by any thread. The calling thread's own current context is left as it was. Destructors
// give back and stay silent: an error that the driver tells there is of work that has already failed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "cuda_api.hpp"
#include "element.hpp"

namespace kvlink {

// Which kernels: those of a conversion, or of plain copies.
struct KernelTypes {
  std::optional<Element> source = std::nullopt;
  std::optional<Element> target = std::nullopt;

  auto operator<=>(const KernelTypes&) const = default;
};

class CudaGpu : public std::enable_shared_from_this<CudaGpu> {
 public:
  // Throws Unavailable if there is no such device, CudaError if it cannot be used.
  CudaGpu(std::shared_ptr<const CudaApi> api, int ordinal);
  ~CudaGpu();
  CudaGpu(const CudaGpu&) = delete;
  CudaGpu& operator=(const CudaGpu&) = delete;

  const CudaApi& api() const { return *api_; }
  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  const std::string& arch() const { return arch_; }  // "sm_90"
  unsigned multiprocessors() const { return multiprocessors_; }

  // Loads a cubin of kernels.cu; again for the same types does nothing.
  void load(const KernelTypes& types, std::span<const std::byte> image);
  bool loaded(const KernelTypes& types) const;
  // Throws CudaError if the types' kernels are not loaded, or there is none of that name.
  cuda::Function kernel(const KernelTypes& types, const std::string& name) const;

  // Makes this GPU's context the calling thread's, and at the end of its life the one before.
  class Current {
   public:
    explicit Current(const CudaGpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaApi& api_;
  };

 private:
  std::shared_ptr<const CudaApi> api_;
  int ordinal_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  std::string name_;
  std::string arch_;
  unsigned multiprocessors_ = 1;
  mutable std::mutex mutex_;
  std::map<KernelTypes, cuda::Module> modules_;
};

using SharedGpu = std::shared_ptr<const CudaGpu>;

// Memory of the device. Addresses are not the host's to touch.
class CudaMemory {
 public:
  CudaMemory(SharedGpu gpu, std::size_t bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  std::uint64_t address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

 private:
  SharedGpu gpu_;
  std::size_t bytes_;
  cuda::Address address_ = 0;
};

// Memory of the host that does not move: kernels may use its addresses, and copies of it overlap with others.
class CudaHostMemory {
 public:
  CudaHostMemory(SharedGpu gpu, std::size_t bytes);
  ~CudaHostMemory();
  CudaHostMemory(const CudaHostMemory&) = delete;
  CudaHostMemory& operator=(const CudaHostMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(memory_); }
  std::size_t bytes() const { return bytes_; }

 private:
  SharedGpu gpu_;
  std::size_t bytes_;
  void* memory_ = nullptr;
};

// A point in a stream's work.
class CudaEvent {
 public:
  explicit CudaEvent(SharedGpu gpu, bool timed = false);
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  cuda::Event get() const { return event_; }
  // Whether all work before the last record is done; so is an event that was never recorded. Throws what failed there.
  bool done() const;
  void synchronize() const;
  float seconds_since(const CudaEvent& start) const;

 private:
  SharedGpu gpu_;
  cuda::Event event_ = nullptr;
};

// A stream of our own, which waits for no other unless told to. Handles of events and streams may be an engine's.
class CudaStream {
 public:
  explicit CudaStream(SharedGpu gpu);
  // Waits for the stream's work: what it uses may go after it.
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cuda::Stream get() const { return stream_; }
  const SharedGpu& gpu() const { return gpu_; }
  void record(const CudaEvent& event) const;
  // What is queued here from now on comes after what `event` recorded.
  void wait(cuda::Event event) const;
  // ... after all that is queued on `other` now.
  void wait_for_stream(cuda::Stream other) const;
  // What is queued on `other` from now on comes after all that is queued here now.
  void fence(cuda::Stream other) const;
  void copy_to_device(std::uint64_t target, const void* source, std::size_t bytes) const;
  void copy_to_host(void* target, std::uint64_t source, std::size_t bytes) const;
  void copy_on_device(std::uint64_t target, std::uint64_t source, std::size_t bytes) const;
  void fill(std::uint64_t target, std::uint8_t value, std::size_t bytes) const;
  // Calls function(argument) on a thread of the driver once all that is queued here now is done; it must not call the
  // driver.
  void call_when_done(void (*function)(void*), void* argument) const;
  void synchronize() const;

 private:
  SharedGpu gpu_;
  cuda::Stream stream_ = nullptr;
};

}  // namespace kvlink
