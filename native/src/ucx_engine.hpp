// One engine per link: the calls that Python makes, and the thread behind them. See docs/architecture.md, "Native core".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "ucx_core.hpp"
#include "ucx_peer.hpp"

namespace kvlink {

// No room for another read now; nothing was changed.
class EngineFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The Python side's view of a peer. The thread takes it down before it ends the peer, and takes all commands once more
// after that: so a read that was accepted always completes before PEER_LOST.
struct PeerLink {
  enum class State { connecting, up, leaving, gone };
  std::mutex mutex;
  State state = State::connecting;
  std::shared_ptr<const RemoteRegions> remote = std::make_shared<RemoteRegions>();
};

namespace command {
struct Connect {
  std::uint64_t op;
  std::string peer;
  Bytes address;
  std::unique_ptr<Channel> channel;
  std::shared_ptr<PeerLink> link;
};
struct Disconnect {
  std::uint64_t op;
  std::string peer;
};
struct StartRead {
  std::unique_ptr<UcxRead> read;
};
struct CutOff {
  std::uint64_t op;
  std::string peer;
  AttemptId attempt;
};
struct LeaseBegan {};
struct Close {};
}  // namespace command

using Command = std::variant<command::Connect, command::Disconnect, command::StartRead, command::CutOff,
                             command::LeaseBegan, command::Close>;

// The thread's side: everything here happens in run().
class EngineThread {
 public:
  explicit EngineThread(std::shared_ptr<EngineCore> core);
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  CommandQueue<Command>& commands() { return commands_; }
  void run();
  // After run(): UCX did not end all gets within the close bound, so memory they may fill stays registered, for good.
  bool abandoned() const { return abandoned_; }

 private:
  struct Member {
    std::unique_ptr<UcxPeer> peer;
    std::shared_ptr<PeerLink> link;
    bool watching_write = false;
    std::uint64_t left_at_turn = 0;
  };

  void turn();
  void obey_all();
  void obey(command::Connect& connect);
  void obey(command::Disconnect& disconnect);
  void obey(command::StartRead& start);
  void obey(command::CutOff& cut_off);
  void obey(command::LeaseBegan&);
  void obey(command::Close&);

  void run_timers(Time now);
  Time settle(Time now);
  bool leave(Member& member);
  bool move();
  bool digest();
  void wait(bool busy, Time until);
  void watch(Member& member);
  void lose_all(const char* detail);
  void abandon();

  std::shared_ptr<EngineCore> core_;
  CommandQueue<Command> commands_;
  std::vector<Command> taken_;
  std::size_t obeyed_ = 0;
  std::map<std::string, Member> members_;  // its nodes stay put: epoll holds their addresses
  int epoll_;
  std::uint64_t turn_ = 0;
  Time last_timers_{};
  Time next_timers_{};
  std::optional<Time> close_by_;
  bool done_ = false;
  bool abandoned_ = false;
  std::vector<Lapse> lapsed_;
  std::vector<UcxPeer*> readers_;
};

// The calls. One thread makes them, and none waits for the network. Errors: UcxError, std::invalid_argument (the plan
// leaves a region), std::runtime_error (state), EngineFull; then nothing was changed.
class UcxEngine {
 public:
  explicit UcxEngine(EngineSettings settings);  // Unavailable, UcxError
  ~UcxEngine();
  UcxEngine(const UcxEngine&) = delete;
  UcxEngine& operator=(const UcxEngine&) = delete;

  const UcxContext& context() const { return *core_->context; }
  const LateFrames& late() const { return core_->late; }

  void register_region(std::size_t region, std::uint64_t address, std::uint64_t length);
  void unregister_region(std::size_t region);
  RemoteKey export_key(std::size_t region) const;

  std::uint64_t connect(const std::string& peer, Bytes address, int channel_fd);
  void import_key(const std::string& peer, std::size_t region, RemoteKey key);
  std::uint64_t disconnect(const std::string& peer);

  void expose(const std::string& peer, AttemptId attempt, std::shared_ptr<const Plan> plan, Duration lease);
  LeaseAnswer lease(const std::string& peer, AttemptId attempt);
  LeaseAnswer withdraw(const std::string& peer, AttemptId attempt);

  // `spec` lacks its op and regions.
  std::uint64_t read(ReadSpec spec);
  std::uint64_t cut_off(const std::string& peer, AttemptId attempt);

  std::vector<Completion> poll(std::size_t limit) { return core_->completions.pop(limit); }
  int fileno() const { return core_->completions.fd(); }
  bool arm() { return core_->completions.arm(); }

  // Ends everything, within the close bound. False if gets could not be ended: their blocks must never be used again.
  // In a forked child, where the thread does not exist, it only lets go of everything.
  bool close();

 private:
  void let_go();
  void require_open() const;
  std::shared_ptr<PeerLink> require_link(const std::string& peer) const;
  std::shared_ptr<const UcxRegion> require_region(std::size_t region) const;

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
