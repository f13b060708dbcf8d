// One peer as the engine's thread sees it: its channel, the leases it renews, our reads from it, and its end. What
// moves the bytes derives from it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "channel.hpp"
#include "engine_core.hpp"
#include "read.hpp"

namespace kvlink {

class Peer : protected FrameSink {
 public:
  Peer(EngineCore& core, std::string name, std::unique_ptr<Channel> channel);
  virtual ~Peer() = default;
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const std::string& name() const { return name_; }
  Channel* channel() const { return channel_.get(); }

  // Its lease is renewed before it can have gone long without, but not in the way of its first bytes: most reads, and
  // their commits, are over by then.
  void read(std::shared_ptr<ActiveRead> read);
  void cut_off(std::uint64_t op, AttemptId attempt);
  // Renews a lease no longer whose read has ended.
  void forget(AttemptId attempt);
  void disconnect(std::uint64_t op);  // op 0: nobody asks for its end
  // Reset, silence or a violation. Idempotent.
  void lose(std::string detail);  // by value: it may be the channel's own
  // Its lease of an attempt lapsed: whoever still reads should know.
  void tell_lapsed(AttemptId attempt);
  bool leaving() const { return life_ != Life::up; }
  bool reading() const { return !reads_.empty(); }

  void receive();
  void flush();
  // Heartbeats and silence. Returns when to call again.
  Time tick(Time now);

  // Completes what is over. Returns when to call again at the latest.
  virtual Time settle(Time now);
  // Nothing is left; finish() reports it.
  virtual bool over() const { return leaving() && reads_.empty(); }
  // Reads, or an end, under way: the engine's thread looks at idle peers only when they tick.
  virtual bool busy() const { return leaving() || !reads_.empty(); }
  void finish();

 protected:
  // The read is one of reads_ now: bring its bytes.
  virtual void begin(ActiveRead& read) = 0;
  // It ended, well or not; no byte of it lands any more.
  virtual void ended(ActiveRead&) {}
  // The peer is leaving: exposures have ended, reads are stopped.
  virtual void on_leaving() {}

  // Not every transport digests over the channel, or packs: by default these are violations.
  void on_want(AttemptId attempt) override;
  void on_leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests) override;
  void on_ring_wanted(std::uint64_t slots) override;
  void on_ring(const RingOffer& offer) override;
  void on_pack(const PackAsk& ask) override;
  void on_packed(const PackAnswer& answer) override;

  bool lost() const { return life_ == Life::lost; }
  void heard() { heard_ = Clock::now(); }
  ActiveRead* find(AttemptId attempt) const;
  void complete_over(Time now);

  std::unique_ptr<Channel> channel_;
  std::vector<std::shared_ptr<ActiveRead>> reads_;

 private:
  enum class Life { up, lost, disconnecting };

  void on_heartbeat(std::span<const AttemptId> renewed) override;
  void on_failed(AttemptId attempt, FailReason reason) override;
  void leave(Life life, std::string detail, Outcome outcome);
  void renew(Time now);
  void complete(ActiveRead& read, Time now);

  EngineCore& core_;
  const std::string name_;
  std::vector<std::pair<AttemptId, Time>> lingering_;
  std::vector<AttemptId> renewing_;
  Time heard_;
  Time next_heartbeat_;
  Life life_ = Life::up;
  std::string end_detail_;
  std::vector<std::uint64_t> disconnects_;
};

}  // namespace kvlink
