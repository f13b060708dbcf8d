#include "cuda_plan.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "digest.hpp"

namespace kvlink {
namespace {

constexpr unsigned kUnroll = 4;          // of kernels.cu's movers
constexpr unsigned kBlocksPerProcessor = 8;

KernelTypes types_of(const Conversion* convert) {
  if (convert == nullptr) return {};
  return {convert->source, convert->target};
}

// A table's rows, at the next multiple of 16 of a stretch that is measured first and then written.
class Layout {
 public:
  template <class Row>
  std::size_t add(const std::vector<Row>& rows) {
    const std::size_t at = end_;
    end_ += (rows.size() * sizeof(Row) + 15) / 16 * 16;
    return at;
  }
  std::size_t bytes() const { return end_; }

 private:
  std::size_t end_ = 0;
};

template <class Row>
const Row* put(std::byte* memory, std::uint64_t device, std::size_t at, const std::vector<Row>& rows) {
  if (rows.empty()) return nullptr;
  std::memcpy(memory + at, rows.data(), rows.size() * sizeof(Row));
  return reinterpret_cast<const Row*>(device + at);
}

void run(const CudaStream& stream, cuda::Function function, std::uint64_t blocks, void* argument) {
  const CudaGpu& gpu = *stream.gpu();
  const std::uint64_t most = std::uint64_t{gpu.multiprocessors()} * kBlocksPerProcessor;
  void* parameters[] = {argument};
  const CudaGpu::Current current(gpu);
  gpu.api().check(gpu.api().launch(function, static_cast<unsigned>(std::clamp<std::uint64_t>(blocks, 1, most)), 1, 1,
                                   kernels::kThreads, 1, 1, 0, stream.get(), parameters, nullptr),
                  "cuLaunchKernel");
}

}  // namespace

std::vector<KernelTypes> kernel_types(const Plan& plan) {
  std::vector<KernelTypes> all{{}};  // digests of what converts in several ways are those of copies
  for (const Plan::Part& part : plan.parts()) {
    if (part.convert) all.push_back(types_of(&*part.convert));
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

std::unique_ptr<CudaPlan> CudaPlan::relayout(const CudaStream& stream, const Plan& plan,
                                             std::span<const std::int64_t> source_addresses,
                                             std::span<const std::int64_t> target_addresses, bool in_leaves) {
  std::vector<JobPart> parts;
  for (std::size_t part = 0; part < plan.parts().size(); ++part) {
    parts.push_back(job_part(plan, part, source_addresses, target_addresses));
  }
  return std::unique_ptr<CudaPlan>(new CudaPlan(stream, plan, Form::relayout, in_leaves, std::move(parts)));
}

std::unique_ptr<CudaPlan> CudaPlan::packed(const CudaStream& stream, const Plan& plan, Side side,
                                           std::span<const std::int64_t> addresses) {
  std::vector<JobPart> parts;
  for (std::size_t part = 0; part < plan.parts().size(); ++part) {
    parts.push_back(packed_job_part(plan, part, side, addresses));
  }
  const Form form = side == Side::source ? Form::gather : Form::scatter;
  return std::unique_ptr<CudaPlan>(new CudaPlan(stream, plan, form, true, std::move(parts)));
}

CudaPlan::CudaPlan(const CudaStream& stream, const Plan& plan, Form form, bool in_leaves, std::vector<JobPart> parts)
    : form_(form), in_leaves_(in_leaves), total_bytes_(plan.total_bytes()) {
  std::vector<PartJobs> tables;
  add_moves(*stream.gpu(), parts, &tables);
  if (in_leaves && !parts.empty()) add_digests(*stream.gpu(), std::move(parts), &tables);
  upload(stream, tables);
}

void CudaPlan::add_jobs(const JobPart& part, int elements, std::vector<PartJobs>* tables) {
  tables->push_back(part_jobs(part, elements));
  for (const kernels::Job& job : tables->back().jobs) {
    job_ends_.push_back(job.wire_begin + std::int64_t{job.items} * elements * part.source_size());
  }
}

void CudaPlan::add_moves(const CudaGpu& gpu, std::span<const JobPart> parts, std::vector<PartJobs>* tables) {
  fused_ = in_leaves_ && std::all_of(parts.begin(), parts.end(), [&](const JobPart& part) {
    return types_of(part.convert) == types_of(parts.front().convert);
  });
  std::vector<int> elements;
  for (std::size_t p = 0; p < parts.size(); ++p) elements.push_back(item_elements(parts[p], p, in_leaves_));
  digest_elements_ = parts.empty() ? 1 : *std::min_element(elements.begin(), elements.end());
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const int width = fused_ ? digest_elements_ : elements[p];  // one for all that is digested together
    const KernelTypes types = types_of(parts[p].convert);
    const std::size_t first = job_ends_.size();
    add_jobs(parts[p], width, tables);
    parts_.push_back({types, width, first, job_ends_.size() - first,
                      gpu.kernel(types, "kvlink_move_" + std::to_string(width))});
  }
}

// Parts that convert in different ways are digested apart from their moves, read as bytes: the wire's.
void CudaPlan::add_digests(const CudaGpu& gpu, std::vector<JobPart> parts, std::vector<PartJobs>* tables) {
  if (fused_) {
    digest_ = gpu.kernel(parts_.front().types, "kvlink_move_and_digest");
    return;
  }
  digest_first_ = job_ends_.size();
  digest_elements_ = 16;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    JobPart& part = parts[p];
    part.convert = nullptr;
    part.nest.scale_dim = -1;
    for (kernels::Pair& base : part.bases) base.target = 0;  // nothing is written: no alignment to heed
    for (kernels::Pair& piece : part.pieces) piece.target = 0;
    for (std::size_t d = 0; d < part.nest.depth; ++d) part.nest.dims[d].target_stride = 0;
    digest_elements_ = std::min(digest_elements_, item_elements(part, p, true));
  }
  for (const JobPart& part : parts) add_jobs(part, digest_elements_, tables);
  digest_ = gpu.kernel({}, "kvlink_digest");
}

void CudaPlan::upload(const CudaStream& stream, std::span<PartJobs> tables) {
  struct Places {
    std::size_t bases, pieces, source_scales, target_factors;
  };
  Layout layout;
  std::vector<Places> places;
  for (const PartJobs& table : tables) {
    places.push_back({layout.add(table.bases), layout.add(table.pieces), layout.add(table.source_scales),
                      layout.add(table.target_factors)});
  }
  jobs_.resize(job_ends_.size());
  const std::size_t jobs_at = layout.add(jobs_);
  if (layout.bytes() == 0) return;
  host_ = std::make_unique<CudaHostMemory>(stream.gpu(), layout.bytes());
  device_ = std::make_unique<CudaMemory>(stream.gpu(), layout.bytes());
  device_jobs_ = device_->address() + jobs_at;
  auto job = jobs_.begin();
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const auto table = [&](std::size_t at, const auto& rows) {
      return put(host_->data(), device_->address(), at, rows);
    };
    tables[i].place({table(places[i].bases, tables[i].bases), table(places[i].pieces, tables[i].pieces),
                     table(places[i].source_scales, tables[i].source_scales),
                     table(places[i].target_factors, tables[i].target_factors)});
    job = std::copy(tables[i].jobs.begin(), tables[i].jobs.end(), job);
  }
  put(host_->data(), device_->address(), jobs_at, jobs_);
  stream.copy_to_device(device_->address(), host_->data(), layout.bytes());
}

void CudaPlan::launch(const CudaStream& stream, std::int64_t begin, std::int64_t end, std::uint64_t packed,
                      std::uint64_t digests) const {
  const bool whole = begin == 0 && end == total_bytes_;
  if (!in_leaves_ && (!whole || digests != 0)) {
    throw std::invalid_argument("this plan was not made to be launched in leaves");
  }
  if (begin < 0 || end < begin || end > total_bytes_ || begin % kLeafBytes != 0 ||
      (end % kLeafBytes != 0 && end != total_bytes_)) {
    throw std::invalid_argument("wire bytes [" + std::to_string(begin) + ", " + std::to_string(end) +
                                ") are not whole leaves of the plan");
  }
  if (begin == end) return;
  const std::int64_t to_packed = static_cast<std::int64_t>(packed) - begin;
  const kernels::Pair shift{form_ == Form::scatter ? to_packed : 0, form_ == Form::gather ? to_packed : 0};
  if (digests != 0) launch_digests(stream, begin, end, shift, digests);
  if (digests == 0 || !fused_) launch_moves(stream, begin, end, shift);
}

void CudaPlan::launch_moves(const CudaStream& stream, std::int64_t begin, std::int64_t end,
                            kernels::Pair shift) const {
  for (const Part& part : parts_) {
    const std::int64_t size = part.types.source ? facts_of(*part.types.source).bytes : 1;
    const std::int64_t item_bytes = part.elements * size;
    for (std::size_t j = part.first; j < part.first + part.count; ++j) {
      kernels::Job job = jobs_[j];
      const std::int64_t low = std::max(begin, job.wire_begin), high = std::min(end, job_ends_[j]);
      if (low >= high) continue;
      job.first_item = static_cast<std::uint32_t>((low - job.wire_begin) / item_bytes);
      job.items = static_cast<std::uint32_t>((high - low) / item_bytes);
      job.start.source += shift.source;
      job.start.target += shift.target;
      constexpr unsigned tile = kernels::kThreads * kUnroll;
      run(stream, part.move, (std::uint64_t{job.items} + tile - 1) / tile, &job);
    }
  }
}

void CudaPlan::launch_digests(const CudaStream& stream, std::int64_t begin, std::int64_t end, kernels::Pair shift,
                              std::uint64_t digests) const {
  const auto from = job_ends_.begin() + static_cast<std::ptrdiff_t>(digest_first_);
  const auto first = std::upper_bound(from, job_ends_.end(), begin);
  const auto last = std::lower_bound(first, job_ends_.end(), end);
  kernels::LeafWork work{};
  const auto at = static_cast<std::uint64_t>(first - job_ends_.begin());
  work.jobs = reinterpret_cast<const kernels::Job*>(device_jobs_ + at * sizeof(kernels::Job));
  work.digests = reinterpret_cast<std::uint64_t*>(digests);
  work.total_bytes = total_bytes_;
  work.shift = shift;
  work.job_count = static_cast<std::uint32_t>(last - first + 1);
  work.first_leaf = static_cast<std::uint32_t>(begin / kLeafBytes);
  work.leaves = static_cast<std::uint32_t>((end - begin + kLeafBytes - 1) / kLeafBytes);
  work.elements = static_cast<std::uint32_t>(digest_elements_);
  run(stream, digest_, work.leaves, &work);
}

}  // namespace kvlink
