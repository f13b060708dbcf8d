// One peer on the same host: what of its memory is mapped, the rings to and from it, and our reads from it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "copy_pool.hpp"
#include "peer.hpp"
#include "shared_lane.hpp"
#include "shared_process.hpp"
#include "shared_read.hpp"
#include "shared_ring.hpp"

namespace kvlink {

// What a peer that asks is told of a region of ours.
struct OwnRegion {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::shared_ptr<const Backing> backing = nullptr;  // of memory that may be mapped
};

struct SharedCore final : EngineCore {
  explicit SharedCore(const EngineLimits& bounds);

  // By number. Both threads'.
  std::mutex mutex{};
  std::map<std::size_t, OwnRegion> regions{};
  std::optional<Nonce> nonce{};  // made when a peer first asks
  Descriptor lanes;  // an epoll of all peers' lanes
  std::unique_ptr<CopyPool> copiers{};  // beside the engine's thread, whose commands they nudge when a read is over
};

class SharedPeer final : public Peer {
 public:
  SharedPeer(SharedCore& core, std::string name, std::unique_ptr<Channel> channel, std::unique_ptr<SharedLane> lane);
  ~SharedPeer() override;

  // The lane has something to say.
  void hear();
  // A bounded piece of each kind of work there is.
  struct Step {
    bool any = false;
    bool over = false;  // a read may have ended
  };
  Step step();
  // When there is nothing else to do: a bounded piece of getting a mapping ready. False if all are.
  bool prepare();
  // When step() has something to do again that the bandwidth cap has put off.
  Time put_off_until() { return turns_.put_off_until(); }

  // Before a sleep: the peer rings the lane's bell from now on. False if there is news already.
  bool doze();
  void wake();
  // Something comes by a ring, so that waiting for it without sleep may pay.
  bool expecting() const { return serving_.has_value() || (asking_.has_value() && asking_->waiting()); }
  bool news() const { return (asking_ && asking_->answered()) || (serving_ && serving_->asked()); }
  bool peer_is_on_this_cpu() const;
  bool peer_is_awake() const;

 private:
  void begin(ActiveRead& read) override;
  void ended(ActiveRead& read) override;
  void on_leaving() override;

  void on(const Telling& telling);
  OwnRegion own_region(std::uint32_t region);
  void give_region(std::uint32_t region);
  void take_region(const Telling& telling);
  void give_proof();
  void take_proof(const Telling& telling);
  void give_place(std::uint32_t region);
  void take_place(const Telling& telling);
  void give_ring();
  void take_ring();

  enum class Way { unknown, mapped, pulled, ring };
  Way way_of(SharedRead& read);
  Way by_map(SharedRead& read);
  Way by_pull(SharedRead& read, std::string why);
  Way by_ring(SharedRead& read, std::string why);
  bool may_pull();
  bool may_ask();
  void decide();
  void start(std::shared_ptr<SharedRead> read, Way way);

  void step_all(Step& step);
  void serve(Step& step);
  void land(Step& step);
  void ask();
  void copy(Step& step);
  void forget_lane();

  SharedCore& core_;
  std::unique_ptr<SharedLane> lane_;
  Turns turns_;
  std::deque<std::shared_ptr<SharedRead>> undecided_;
  std::deque<std::shared_ptr<SharedRead>> copying_;  // reads with something left to copy that nothing is asked for
  std::deque<std::shared_ptr<SharedRead>> asking_for_;  // with something left to ask for: bytes, or their digests
  std::vector<std::shared_ptr<const SharedRegion>> mapped_;
  std::shared_ptr<const SharedRegion> mapping_;  // asked for; one at a time
  std::uint32_t mapping_number_ = 0;
  std::shared_ptr<PeerProcess> process_;  // once a read would rather be pulled
  std::map<std::uint32_t, std::shared_ptr<const SharedRegion>> finding_;  // asked for, where they lie
  std::optional<RingAsking> asking_;
  std::optional<RingServing> serving_;
};

}  // namespace kvlink
