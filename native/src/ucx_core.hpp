// What the UCX engine's calls, its thread and its peers share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

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
};

struct UcxCore final : EngineCore {
  UcxCore(UcxSettings wanted, std::shared_ptr<UcxContext> opened)
      : EngineCore(wanted.limits), settings(std::move(wanted)), context(std::move(opened)),
        rings(context, settings.ring_slots, settings.max_rings) {}

  const UcxSettings settings;
  const std::shared_ptr<UcxContext> context;

  // --- the engine's thread ---
  UcxRings rings;
  // Made when first needed. Throws std::system_error, UcxError.
  UcxSlots& staging() {
    if (!staging_) staging_ = std::make_unique<UcxSlots>(context, settings.staging_slots);
    return *staging_;
  }

 private:
  std::unique_ptr<UcxSlots> staging_;
};

}  // namespace kvlink
