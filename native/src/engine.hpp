// One engine per link: the calls that Python makes, whatever moves the bytes. See docs/architecture.md, "Native core".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine_thread.hpp"

namespace kvlink {

// The calls. One thread makes them, and none waits for the network. Errors: std::invalid_argument (the plan leaves a
// region), EngineFull, std::runtime_error (state, or the transport's own word); then nothing was changed.
class Engine {
 public:
  virtual ~Engine() = default;  // a transport's own closes
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const LateFrames& late() const { return core_->late; }

  // Before the first peer: what is read keeps to a cap, which other engines may share.
  void pace_by(std::shared_ptr<Pace> pace) { core_->pace = std::move(pace); }
  // The threads run on these CPUs from now on. Throws std::invalid_argument if they cannot.
  virtual void keep_to(const std::vector<int>& cpus);

  virtual void register_region(std::size_t region, std::uint64_t address, std::uint64_t length);
  virtual void unregister_region(std::size_t region);

  std::uint64_t disconnect(const std::string& peer);

  void expose(const std::string& peer, AttemptId attempt, std::shared_ptr<const Plan> plan, Duration lease);
  LeaseAnswer lease(const std::string& peer, AttemptId attempt);
  LeaseAnswer withdraw(const std::string& peer, AttemptId attempt);

  // `spec` lacks its op and regions.
  std::uint64_t read(ReadSpec spec);
  std::uint64_t cut_off(const std::string& peer, AttemptId attempt);
  // Of an attempt whose read has ended: renew its lease no longer. Within a heartbeat; nothing tells of it.
  void forget(const std::string& peer, AttemptId attempt);

  std::vector<Completion> poll(std::size_t limit) { return core_->completions.pop(limit); }
  int fileno() const { return core_->completions.fd(); }
  bool arm() { return core_->completions.arm(); }

  // Ends everything, within the close bound. False if some bytes could not be kept from landing: their blocks must
  // never be used again. In a forked child, where the threads do not exist, it only lets go of everything.
  bool close();

 protected:
  Engine(const char* name, std::shared_ptr<EngineCore> core, std::unique_ptr<EngineThread> behind);

  // What the transport holds of a region while it is registered.
  virtual std::shared_ptr<const void> hold(std::uint64_t address, std::uint64_t length) = 0;
  virtual std::shared_ptr<ActiveRead> make_read(ReadSpec spec, std::shared_ptr<const LocalRegions> to,
                                                std::shared_ptr<const RemoteRegions> from) = 0;
  // The engine's thread has ended.
  virtual void closed() {}
  // In a forked child: leak what a fork copied and must not be torn down.
  virtual void let_go_own() {}

  void require_open() const;
  bool is_closed() const { return closed_; }
  EngineThread& behind() { return *behind_; }
  // Of a registered region; throws std::invalid_argument.
  std::shared_ptr<const void> held(std::size_t region) const;
  std::uint64_t length_of(std::size_t region) const;

  std::uint64_t connect(const std::string& peer, std::unique_ptr<Channel> channel, command::MakePeer make);
  void learn_region(const std::string& peer, std::size_t region, std::uint64_t length,
                    std::shared_ptr<const void> held);

 private:
  void let_go();
  std::shared_ptr<PeerLink> require_link(const std::string& peer) const;

  const char* const name_;
  std::shared_ptr<EngineCore> core_;
  std::unique_ptr<EngineThread> behind_;
  std::thread thread_;
  const int pid_;
  bool closed_ = false;
  std::uint64_t last_op_ = 0;
  std::shared_ptr<const LocalRegions> local_ = std::make_shared<LocalRegions>();
  std::map<std::string, std::shared_ptr<PeerLink>> links_;
};

}  // namespace kvlink
