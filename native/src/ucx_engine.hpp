// The UCX engine: what its calls add to every engine's, and the thread that progresses UCX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"
#include "ucx_core.hpp"
#include "ucx_peer.hpp"

namespace kvlink {

// Commands, UCX progress, channels, digests, timers.
class UcxThread final : public EngineThread {
 public:
  explicit UcxThread(std::shared_ptr<UcxCore> core);

 private:
  bool move() override;
  bool may_sleep() override;
  Time wake_by() override;

  std::shared_ptr<UcxCore> core_;
  std::vector<UcxPeer*> readers_;
};

class UcxEngine final : public Engine {
 public:
  explicit UcxEngine(UcxSettings settings);  // Unavailable, UcxError
  ~UcxEngine() override;

  const UcxContext& context() const {
    require_open();
    return *core_->context;
  }
  RemoteKey export_key(std::size_t region) const;
  std::uint64_t connect(const std::string& peer, Bytes address, int channel_fd);
  void import_key(const std::string& peer, std::size_t region, RemoteKey key);

 private:
  explicit UcxEngine(std::shared_ptr<UcxCore> core);

  void closed() override;
  std::shared_ptr<const void> hold(std::uint64_t address, std::uint64_t length) override;
  std::shared_ptr<ActiveRead> make_read(ReadSpec spec, std::shared_ptr<const LocalRegions> to,
                                        std::shared_ptr<const RemoteRegions> from) override;

  std::shared_ptr<UcxCore> core_;
};

}  // namespace kvlink
