// What an engine's calls, its thread and its peers share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "events.hpp"
#include "exposures.hpp"
#include "ucx_context.hpp"

namespace kvlink {

struct EngineSettings {
  std::string libucp;
  std::optional<std::string> tls;
  Duration heartbeat;
  Duration peer_lost;
  Duration cut_off_grace;
  Duration close_timeout;
  Duration renewal_linger;       // renewals go on this long after a read ended well, for its commit
  std::size_t max_reads;
  std::uint32_t max_gets_per_read;
};

// Snapshots by region number. Replaced whole when a region comes or goes; readers keep the one they started with, and
// with it the registrations.
struct LocalRegions {
  std::vector<std::shared_ptr<const UcxRegion>> regions;
  std::vector<const std::byte*> data;
  std::vector<std::int64_t> lengths;
};
struct RemoteRegions {
  std::vector<std::shared_ptr<const RemoteKey>> keys;
  std::vector<std::int64_t> lengths;
};

// Frames that came too late to matter. Late ones are normal; a flood of them is worth seeing.
struct LateFrames {
  std::atomic<std::uint64_t> renewals{0};
  std::atomic<std::uint64_t> wants{0};
  std::atomic<std::uint64_t> leaves{0};
  std::atomic<std::uint64_t> failures{0};
};

struct EngineCore {
  EngineSettings settings;
  std::shared_ptr<UcxContext> context;
  Exposures exposures{};
  CompletionQueue completions{};
  std::atomic<std::size_t> active_reads{0};
  LateFrames late{};
};

}  // namespace kvlink
