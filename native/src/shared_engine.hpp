// The engine of ends on one host: what its calls add to every engine's, and the thread that copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "engine.hpp"
#include "shared_peer.hpp"
#include "spread.hpp"

namespace kvlink {

// Commands, lanes, copies, digests, timers. It waits for a peer's next word without sleep, for a short while.
class SharedThread final : public EngineThread {
 public:
  SharedThread(std::shared_ptr<SharedCore> core, std::size_t copy_threads);

 private:
  bool move() override;
  bool may_sleep() override;
  Time wake_by() override;

  void hear_lanes();
  void wake_all();
  bool copying_beside(Time now) const;
  bool linger(Time now);
  bool prepare();

  std::shared_ptr<SharedCore> core_;
  Time last_moved_{};
  Spread spread_;
  bool dozing_ = false;
};

class SharedEngine final : public Engine {
 public:
  // `copy_threads` of them copy beside the engine's own.
  SharedEngine(const EngineLimits& limits, std::size_t copy_threads);
  ~SharedEngine() override;

  void keep_to(const std::vector<int>& cpus) override;

  void register_region(std::size_t region, std::uint64_t address, std::uint64_t length) override;
  void unregister_region(std::size_t region) override;
  // `fd` is of a sealed file that holds the region at `offset`; it is duplicated. Throws as register_region, and
  // std::invalid_argument on a file that cannot be given to others.
  void register_backed(std::size_t region, std::uint64_t address, std::uint64_t length, int fd, std::uint64_t offset);
  std::uint64_t region_length(std::size_t region) const { return length_of(region); }
  bool is_backed(std::size_t region) const;
  void import_region(const std::string& peer, std::size_t region, std::uint64_t length, bool mappable);
  // Takes both descriptors over, whatever happens.
  std::uint64_t connect(const std::string& peer, int channel_fd, int lane_fd);

 private:
  SharedEngine(std::shared_ptr<SharedCore> core, std::size_t copy_threads);

  std::shared_ptr<const void> hold(std::uint64_t address, std::uint64_t length) override;
  std::shared_ptr<ActiveRead> make_read(ReadSpec spec, std::shared_ptr<const LocalRegions> to,
                                        std::shared_ptr<const RemoteRegions> from) override;
  void closed() override;
  void tell_of(std::size_t region, OwnRegion own);

  std::shared_ptr<SharedCore> core_;
};

}  // namespace kvlink
