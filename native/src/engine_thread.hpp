// The thread behind an engine: commands, channels, timers, and the peers' beginnings and ends; asleep when there is
// nothing of these. What moves bytes derives from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "peer.hpp"

namespace kvlink {

namespace command {
// Makes the transport's peer on the thread. What it throws ends the connection as unreachable.
using MakePeer = std::function<std::unique_ptr<Peer>(std::unique_ptr<Channel> channel)>;

struct Connect {
  std::uint64_t op;
  std::string peer;
  std::unique_ptr<Channel> channel;
  MakePeer make;
  std::shared_ptr<PeerLink> link;
};
struct Disconnect {
  std::uint64_t op;
  std::string peer;
};
struct StartRead {
  std::shared_ptr<ActiveRead> read;
};
struct CutOff {
  std::uint64_t op;
  std::string peer;
  AttemptId attempt;
};
// Nothing waits for it: renew this attempt's lease no longer.
struct Forget {
  std::string peer;
  AttemptId attempt;
};
// From another thread of the transport: the peer is lost.
struct Lose {
  std::string peer;
  std::string detail;
};
struct LeaseBegan {};
// Something may have ended: look at the busy peers.
struct Nudge {};
struct Close {};
}  // namespace command

using Command = std::variant<command::Connect, command::Disconnect, command::StartRead, command::CutOff,
                             command::Forget, command::Lose, command::LeaseBegan, command::Nudge, command::Close>;

class EngineThread {
 public:
  explicit EngineThread(std::shared_ptr<EngineCore> core);
  virtual ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  CommandQueue<Command>& commands() { return commands_; }
  void run();
  // After run(): not all bytes could be kept from landing within the close bound, so what they may fill stays held, for
  // good.
  bool abandoned() const { return abandoned_; }

 protected:
  // Moves bytes for a slice of time, bounded; true if there may be more to do at once.
  virtual bool move() = 0;
  // Before a sleep: true if the descriptors that are watched will tell of what is yet to come.
  virtual bool may_sleep() { return true; }

  // Before a sleep: when it is to end at the latest, for what was put off.
  virtual Time wake_by() { return Time::max(); }

  // A descriptor whose readiness ends the sleep; it says nothing more.
  void wake_on(int fd);
  template <typename Visit>
  void each_peer(Visit visit) {
    for (auto& [name, member] : members_) visit(*member.peer);
  }

 private:
  struct Member {
    std::unique_ptr<Peer> peer;
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
  void obey(command::Forget& forget);
  void obey(command::Lose& lose);
  void obey(command::LeaseBegan&);
  void obey(command::Nudge&) {}
  void obey(command::Close&);

  void look_at_timers_soon();
  void run_timers(Time now);
  Time settle(Time now);
  bool leave(Member& member);
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
};

}  // namespace kvlink
