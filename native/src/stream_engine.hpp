// The stream engine: what its calls, its peers and its threads add to every engine's. See docs/architecture.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine.hpp"
#include "stream_lane.hpp"
#include "stream_mover.hpp"

namespace kvlink {

struct StreamCore final : EngineCore {
  explicit StreamCore(const EngineLimits& bounds) : EngineCore(bounds) {}

  std::vector<std::unique_ptr<Mover>> movers;  // the engine's thread turns the first, the others have their own
};

class StreamPeer final : public Peer {
 public:
  // One lane a mover, from the first on.
  StreamPeer(StreamCore& core, std::string name, std::unique_ptr<Channel> channel,
             std::vector<std::shared_ptr<Lane>> lanes);

  // Only once its lanes are closed: its name is free then, and none of them serves under it any more.
  bool over() const override;

 private:
  void begin(ActiveRead& read) override;
  void on_leaving() override;

  StreamCore& core_;
  const std::vector<std::shared_ptr<Lane>> lanes_;
  const std::shared_ptr<Demand> demand_;
  std::size_t next_lane_ = 0;
};

class StreamThread final : public EngineThread {
 public:
  explicit StreamThread(std::shared_ptr<StreamCore> core, std::size_t movers);

 private:
  bool move() override;
  Time wake_by() override { return core_->movers.front()->wake_by(); }

  std::shared_ptr<StreamCore> core_;
};

class StreamEngine final : public Engine {
 public:
  // `lanes` is the most that a peer has.
  StreamEngine(const EngineLimits& limits, std::size_t lanes);
  ~StreamEngine() override;

  void keep_to(const std::vector<int>& cpus) override;
  std::uint64_t region_length(std::size_t region) const { return length_of(region); }
  void import_region(const std::string& peer, std::size_t region, std::uint64_t length);
  // Takes all descriptors over, whatever happens.
  std::uint64_t connect(const std::string& peer, int channel_fd, const std::vector<int>& lane_fds);

 private:
  StreamEngine(const EngineLimits& limits, std::size_t lanes, std::shared_ptr<StreamCore> core);

  std::shared_ptr<const void> hold(std::uint64_t address, std::uint64_t length) override;
  std::shared_ptr<ActiveRead> make_read(ReadSpec spec, std::shared_ptr<const LocalRegions> to,
                                        std::shared_ptr<const RemoteRegions> from) override;
  void closed() override;
  void let_go_own() override;

  std::shared_ptr<StreamCore> core_;
  std::vector<std::thread> threads_;  // of all movers but the first
};

}  // namespace kvlink
