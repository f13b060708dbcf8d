// The packer of caches that lie on a GPU: kernels gather into slots and scatter out of them, digesting as they go.
//
// Slots are pinned memory of the host, or memory of the device; either is the kernels' to touch. All work is on two
// streams of the packer's own, one a direction, and a job's end is an event: its slot comes back when that has passed.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "cuda_gpu.hpp"
#include "cuda_plan.hpp"
#include "events.hpp"
#include "packer.hpp"

namespace kvlink {

class CudaPacker final : public Packer {
 public:
  // `staging_on_device`: slots are memory of the device, for carriers that can get from it; else pinned memory.
  explicit CudaPacker(SharedGpu gpu, bool staging_on_device = false);

  // Throw std::invalid_argument if a plan's elements are not aligned, CudaError if the driver refuses.
  std::unique_ptr<PackJob> gather(const PackRange& range, std::span<const std::byte* const> regions,
                                  std::byte* slot) override;
  std::unique_ptr<PackJob> scatter(const PackRange& range, const std::byte* slot,
                                   std::span<std::byte* const> regions) override;
  std::unique_ptr<StagingMemory> staging(std::size_t bytes) override;
  int fd() const override { return wakeup_.fd(); }

 private:
  class Job;
  // A plan's tables on the device, kept for the next ranges.
  struct Ready {
    std::uint64_t plan;
    Side side;
    std::vector<std::int64_t> regions;
    std::shared_ptr<const CudaPlan> tables;
  };
  // What a job holds while the device works, and leaves for the next.
  struct Tools {
    explicit Tools(const SharedGpu& gpu);
    CudaEvent event;
    CudaHostMemory digests;
  };

  std::shared_ptr<const CudaPlan> tables_of(const CudaStream& stream, const Plan& plan, Side side,
                                            std::vector<std::int64_t> regions);
  std::unique_ptr<PackJob> begin(const CudaStream& stream, const PackRange& range, Side side,
                                 std::vector<std::int64_t> regions, const std::byte* slot);
  std::unique_ptr<Tools> take_tools();
  // Clears the descriptor, but not of what another job is waiting to be told.
  void settle();

  SharedGpu gpu_;
  bool staging_on_device_;
  EventFd wakeup_;
  std::list<Ready> ready_;  // used last first
  std::vector<std::unique_ptr<Tools>> spare_;
  std::vector<const Job*> waiting_;
  CudaStream gathers_;  // last: their destructors wait for what uses the rest
  CudaStream scatters_;
};

}  // namespace kvlink
