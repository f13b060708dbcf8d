// What the UCX engine's calls, its thread and its peers share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cuda_packer.hpp"
#include "engine_core.hpp"
#include "ucx_context.hpp"
#include "ucx_staging.hpp"

namespace kvlink {

struct UcxSettings {
  EngineLimits limits;
  std::string libucp;
  std::optional<std::string> tls;
  Duration cut_off_grace;
  std::uint32_t max_gets_per_read;
  std::uint32_t ring_slots;     // of one peer's ring
  std::uint32_t max_rings;
  std::uint32_t staging_slots;  // that our own gets fill, of all peers together
  SharedGpu gpu = nullptr;      // where the caches lie; null for the host
  bool staging_on_gpu = false;  // slots are its memory, not pinned memory of the host
};

struct UcxCore final : EngineCore {
  UcxCore(UcxSettings wanted, std::shared_ptr<UcxContext> opened)
      : EngineCore(wanted.limits), settings(std::move(wanted)), context(std::move(opened)),
        rings(std::in_place, context, packer_for(settings), settings.ring_slots, settings.max_rings) {}

  // After the thread's end, where nothing was abandoned: UCX goes with its memory and some 25 descriptors. What is left
  // are completions, which may still be polled.
  void let_go_of_ucx() {
    staging_.reset();
    rings.reset();
    context.reset();
  }

  const UcxSettings settings;
  std::shared_ptr<UcxContext> context;

  // --- the engine's thread ---
  std::optional<UcxRings> rings;
  // Made when first needed. Throws std::runtime_error.
  UcxSlots& staging() {
    if (!staging_) staging_ = std::make_unique<UcxSlots>(context, *packer, settings.staging_slots);
    return *staging_;
  }

 private:
  const std::shared_ptr<Packer>& packer_for(const UcxSettings& wanted) {
    if (wanted.gpu) packer = std::make_shared<CudaPacker>(wanted.gpu, wanted.staging_on_gpu);
    return packer;
  }

  std::unique_ptr<UcxSlots> staging_;
};

}  // namespace kvlink
