// One peer read over UCX: its endpoint, the gets, and what is owed to it: digests, and packed slots.
#pragma once

#include <algorithm>
#include <deque>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "pack_serve.hpp"
#include "owed_digests.hpp"
#include "peer.hpp"
#include "ucx_core.hpp"
#include "ucx_endpoint.hpp"
#include "ucx_pull.hpp"
#include "ucx_read.hpp"

namespace kvlink {

// A read ends only when none of its gets is outstanding and, where the endpoint was closed by force, the close has
// completed too: then no byte of it can land. If UCX ever failed to complete them, neither READ nor CUT_OFF would be
// reported, and the blocks would stay with the read: the safe way to be wrong.
class UcxPeer final : public Peer {
 public:
  // Throws UcxError if the address cannot be reached.
  UcxPeer(UcxCore& core, std::string name, Bytes address, std::unique_ptr<Channel> channel);
  ~UcxPeer() override;

  // Each does a bounded piece of work; true if there was any.
  bool post();
  bool verify();
  bool digest();
  bool pack();

  // Closes by force what is overdue, too.
  Time settle(Time now) override;
  bool over() const override { return Peer::over() && !endpoint_; }
  // When post() has something to do again that the bandwidth cap has put off.
  Time put_off_until() { return std::min(pulling_.put_off_until(), turns_.put_off_until()); }

  bool busy() const override {
    return Peer::busy() || owed_.any() || verdict_.has_value() ||
           (endpoint_ && (endpoint_->broken() || endpoint_->closing()));
  }

 private:
  void begin(ActiveRead& read) override;
  void on_leaving() override;
  void on_want(AttemptId attempt) override;
  void on_leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests) override;
  void on_ring_wanted(std::uint64_t slots) override;
  void on_ring(const RingOffer& offer) override;
  void on_pack(const PackAsk& ask) override;
  void on_packed(const PackAnswer& answer) override;
  static void on_get(void* request, ucs_status_t status, void* chunk);

  ActiveRead& read_at(std::size_t index) const { return *reads_[index % reads_.size()]; }
  void begin_packed(UcxPackedRead& read);
  bool endpoint_failed() const;
  bool idle() const;
  bool reachable();
  bool post(UcxDirectRead& read);
  void get(UcxDirectRead& read, ReadJob::Chunk& chunk, const Run& run);
  void stop_started(Outcome outcome, const std::string& detail);
  Time judge_endpoint(Time now);
  Time force_overdue(Time now);
  void complete_unless_closing(Time now);

  UcxCore& core_;
  const Bytes address_;
  std::unique_ptr<UcxEndpoint> endpoint_;
  std::size_t turn_ = 0;  // whose read posts, and verifies, first
  UcxPulling pulling_;
  Turns turns_;  // of the direct path
  std::unique_ptr<UcxSlots> ring_;  // kept for the peer, once it wants one
  std::optional<PackServing> serving_;
  OwedDigests owed_;
  std::optional<Time> verdict_;  // when a broken endpoint is held to be UCX's own failure, not the peer's death
  std::string broken_detail_;
  std::string last_error_;       // UCX's word for the last get that failed
};

}  // namespace kvlink
