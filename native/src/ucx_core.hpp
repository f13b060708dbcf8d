// What the UCX engine's calls, its thread and its peers share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "engine_core.hpp"
#include "ucx_context.hpp"

namespace kvlink {

struct UcxSettings {
  EngineLimits limits;
  std::string libucp;
  std::optional<std::string> tls;
  Duration cut_off_grace;
  std::uint32_t max_gets_per_read;
};

struct UcxCore final : EngineCore {
  UcxCore(UcxSettings wanted, std::shared_ptr<UcxContext> opened)
      : EngineCore(wanted.limits), settings(std::move(wanted)), context(std::move(opened)) {}

  const UcxSettings settings;
  const std::shared_ptr<UcxContext> context;
};

}  // namespace kvlink
