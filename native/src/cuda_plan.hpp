// A plan made ready for one GPU: its jobs (kernel_jobs.hpp), their tables in the device's memory, and the launches that
// run all of it or any stretch of whole leaves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cuda_gpu.hpp"
#include "kernel_jobs.hpp"
#include "plan.hpp"

namespace kvlink {

// What a plan needs loaded (CudaGpu::load): the kernels of its copies, of each conversion, and those that digest.
std::vector<KernelTypes> kernel_types(const Plan& plan);

// Used by one thread. Nothing here waits; the caller keeps the object until what it launched is done.
class CudaPlan {
 public:
  // From region to region, all memory of this GPU or pinned. Not `in_leaves` it can only be launched whole and without
  // digests, and its items may be wider.
  // Throws std::invalid_argument if elements are not aligned, CudaError if kernels are not loaded or memory is out.
  static std::unique_ptr<CudaPlan> relayout(const CudaStream& stream, const Plan& plan,
                                            std::span<const std::int64_t> source_addresses,
                                            std::span<const std::int64_t> target_addresses, bool in_leaves);
  // Between one side's regions and packed bytes, whose place each launch names; in leaves. Throws as `relayout`.
  static std::unique_ptr<CudaPlan> packed(const CudaStream& stream, const Plan& plan, Side side,
                                          std::span<const std::int64_t> addresses);

  std::int64_t total_bytes() const { return total_bytes_; }

  // Wire bytes [begin, end), cut at leaves or at the plan's ends (else throws std::invalid_argument). `packed` is where
  // wire byte `begin` lies; it means nothing to a plan from region to region. With `digests`, memory that the device
  // may write, the digests of the leaves, 8 bytes each; fused with the move where all parts convert alike, else in a
  // pass of its own before it.
  void launch(const CudaStream& stream, std::int64_t begin, std::int64_t end, std::uint64_t packed,
              std::uint64_t digests = 0) const;

 private:
  enum class Form { relayout, gather, scatter };
  // Jobs of one width each, in wire order.
  struct Part {
    KernelTypes types;
    int elements;
    std::size_t first;  // of jobs_
    std::size_t count;
    cuda::Function move;
  };

  CudaPlan(const CudaStream& stream, const Plan& plan, Form form, bool in_leaves, std::vector<JobPart> parts);

  void add_moves(const CudaGpu& gpu, std::span<const JobPart> parts, std::vector<PartJobs>* tables);
  void add_digests(const CudaGpu& gpu, std::vector<JobPart> parts, std::vector<PartJobs>* tables);
  void add_jobs(const JobPart& part, int elements, std::vector<PartJobs>* tables);
  void upload(const CudaStream& stream, std::span<PartJobs> tables);
  void launch_moves(const CudaStream& stream, std::int64_t begin, std::int64_t end, kernels::Pair shift) const;
  void launch_digests(const CudaStream& stream, std::int64_t begin, std::int64_t end, kernels::Pair shift,
                      std::uint64_t digests) const;

  Form form_;
  bool in_leaves_;
  std::int64_t total_bytes_;
  std::vector<Part> parts_;
  std::vector<kernels::Job> jobs_;             // of all parts, then those that digest where they are others
  std::vector<std::int64_t> job_ends_;         // wire offset after each
  std::size_t digest_first_ = 0;               // of jobs_
  int digest_elements_ = 0;
  bool fused_ = false;                         // digesting moves, too
  cuda::Function digest_ = nullptr;
  std::unique_ptr<CudaHostMemory> host_;       // the tables on their way
  std::unique_ptr<CudaMemory> device_;         // ... and there
  std::uint64_t device_jobs_ = 0;
};

}  // namespace kvlink
