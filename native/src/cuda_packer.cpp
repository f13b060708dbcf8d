#include "cuda_packer.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "digest.hpp"
#include "staging.hpp"

namespace kvlink {
namespace {

// Plans whose tables are kept: as many transfers as take turns.
constexpr std::size_t kReadyPlans = 64;
// Digests of the longest range: the slot's.
constexpr std::size_t kDigestBytes = static_cast<std::size_t>(kSlotBytes / kLeafBytes) * sizeof(std::uint64_t);

template <class Pointer>
std::vector<std::int64_t> addresses_of(std::span<const Pointer> regions) {
  std::vector<std::int64_t> addresses;
  for (const auto* region : regions) {
    addresses.push_back(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(region)));
  }
  return addresses;
}

template <class Memory>
class Staging final : public StagingMemory {
 public:
  Staging(const SharedGpu& gpu, std::size_t bytes) : memory_(gpu, bytes) {}

  std::byte* data() const override { return reinterpret_cast<std::byte*>(memory_.address()); }
  std::size_t bytes() const override { return memory_.bytes(); }

 private:
  Memory memory_;
};

}  // namespace

// All of a range is launched when it begins; what is left is to see the event pass.
class CudaPacker::Job final : public PackJob {
 public:
  Job(CudaPacker* packer, std::shared_ptr<const CudaPlan> tables, const CudaStream& stream, const PackRange& range,
      std::uint64_t slot)
      : packer_(packer), tables_(std::move(tables)), leaves_(range.leaves), tools_(packer->take_tools()) {
    if (leaves_.size_bytes() > tools_->digests.bytes()) {
      throw std::invalid_argument("a range is longer than a staging slot");
    }
    try {
      tables_->launch(stream, range.begin, range.end, slot, leaves_.empty() ? 0 : tools_->digests.address());
      stream.record(tools_->event);
      stream.call_when_done([](void* wakeup) { static_cast<const EventFd*>(wakeup)->signal(); }, &packer->wakeup_);
    } catch (const CudaError&) {
      drain(stream);  // part of it may be under way, in memory that is about to be somebody else's
      throw;
    }
    packer_->waiting_.push_back(this);
  }

  ~Job() override {
    try {
      if (!over_) tools_->event.synchronize();
    } catch (const CudaError&) {
      // The context is lost, and with it all that could still have run.
    }
    std::erase(packer_->waiting_, this);
    packer_->spare_.push_back(std::move(tools_));
  }

  Step step() override {
    if (!passed()) {
      packer_->settle();
      return Step::waiting;
    }
    over_ = true;
    std::memcpy(leaves_.data(), tools_->digests.data(), leaves_.size_bytes());
    return Step::done;
  }

  bool passed() const { return tools_->event.done(); }

 private:
  static void drain(const CudaStream& stream) {
    try {
      stream.synchronize();
    } catch (const CudaError&) {
      // As above.
    }
  }

  CudaPacker* packer_;
  std::shared_ptr<const CudaPlan> tables_;
  std::span<std::uint64_t> leaves_;
  std::unique_ptr<Tools> tools_;
  bool over_ = false;
};

CudaPacker::Tools::Tools(const SharedGpu& gpu) : event(gpu), digests(gpu, kDigestBytes) {}

CudaPacker::CudaPacker(SharedGpu gpu, bool staging_on_device)
    : gpu_(std::move(gpu)), staging_on_device_(staging_on_device), gathers_(gpu_), scatters_(gpu_) {}

std::unique_ptr<StagingMemory> CudaPacker::staging(std::size_t bytes) {
  if (staging_on_device_) return std::make_unique<Staging<CudaMemory>>(gpu_, bytes);
  return std::make_unique<Staging<CudaHostMemory>>(gpu_, bytes);
}

std::unique_ptr<PackJob> CudaPacker::gather(const PackRange& range, std::span<const std::byte* const> regions,
                                            std::byte* slot) {
  return begin(gathers_, range, Side::source, addresses_of(regions), slot);
}

std::unique_ptr<PackJob> CudaPacker::scatter(const PackRange& range, const std::byte* slot,
                                             std::span<std::byte* const> regions) {
  return begin(scatters_, range, Side::target, addresses_of(std::span<std::byte* const>(regions)), slot);
}

std::unique_ptr<PackJob> CudaPacker::begin(const CudaStream& stream, const PackRange& range, Side side,
                                           std::vector<std::int64_t> regions, const std::byte* slot) {
  auto tables = tables_of(stream, range.plan, side, std::move(regions));
  return std::make_unique<Job>(this, std::move(tables), stream, range, reinterpret_cast<std::uintptr_t>(slot));
}

std::shared_ptr<const CudaPlan> CudaPacker::tables_of(const CudaStream& stream, const Plan& plan, Side side,
                                                      std::vector<std::int64_t> regions) {
  const auto found = std::find_if(ready_.begin(), ready_.end(), [&](const Ready& ready) {
    return ready.plan == plan.id() && ready.side == side && ready.regions == regions;
  });
  if (found != ready_.end()) {
    ready_.splice(ready_.begin(), ready_, found);
    return found->tables;
  }
  std::shared_ptr<const CudaPlan> tables = CudaPlan::packed(stream, plan, side, regions);
  if (ready_.size() == kReadyPlans) ready_.pop_back();  // jobs under way hold theirs
  ready_.push_front({plan.id(), side, std::move(regions), tables});
  return tables;
}

std::unique_ptr<CudaPacker::Tools> CudaPacker::take_tools() {
  if (spare_.empty()) return std::make_unique<Tools>(gpu_);
  auto tools = std::move(spare_.back());
  spare_.pop_back();
  return tools;
}

void CudaPacker::settle() {
  wakeup_.clear();
  const auto passed = [](const Job* job) {
    try {
      return job->passed();
    } catch (const CudaError&) {
      return true;  // to be told by its own step()
    }
  };
  if (std::any_of(waiting_.begin(), waiting_.end(), passed)) wakeup_.signal();
}

}  // namespace kvlink
