// What an engine's calls, its threads and its peers share, whatever moves the bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "events.hpp"
#include "exposures.hpp"
#include "pace.hpp"
#include "packer.hpp"

namespace kvlink {

struct EngineLimits {
  Duration heartbeat;
  Duration peer_lost;
  Duration close_timeout;
  Duration renewal_linger;       // renewals go on this long after a read ended well, for its commit
  std::size_t max_reads;
};

// No room for another read now; nothing was changed.
class EngineFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Snapshots by region number. Replaced whole when a region comes or goes; readers keep the one they started with, and
// with it what the transport holds of each region (a registration, a key).
struct LocalRegions {
  std::vector<std::shared_ptr<const void>> held;
  std::vector<std::byte*> data;
  std::vector<std::int64_t> lengths;
};
struct RemoteRegions {
  std::vector<std::shared_ptr<const void>> held;
  std::vector<std::int64_t> lengths;
};

// The Python side's view of a peer. The thread takes it down before it ends the peer, and takes all commands once more
// after that: so a read that was accepted always completes before PEER_LOST.
struct PeerLink {
  enum class State { connecting, up, leaving, gone };
  std::mutex mutex;
  State state = State::connecting;
  std::shared_ptr<const RemoteRegions> remote = std::make_shared<RemoteRegions>();
};

// Frames that came too late to matter. Late ones are normal; a flood of them is worth seeing.
struct LateFrames {
  std::atomic<std::uint64_t> renewals{0};
  std::atomic<std::uint64_t> wants{0};
  std::atomic<std::uint64_t> leaves{0};
  std::atomic<std::uint64_t> failures{0};
};

struct EngineCore {
  explicit EngineCore(const EngineLimits& bounds) : limits(bounds) {}
  virtual ~EngineCore() = default;

  const EngineLimits limits;
  Exposures exposures{};
  CompletionQueue completions{};
  std::atomic<std::size_t> active_reads{0};
  LateFrames late{};
  // Touches the caches for paths that pack; the engine's thread uses it. Set, if at all, before the engine starts.
  std::shared_ptr<Packer> packer = std::make_shared<HostPacker>();
  // The cap on what is read, if there is one. Set, if at all, before the first peer.
  std::shared_ptr<Pace> pace = nullptr;
};

}  // namespace kvlink
