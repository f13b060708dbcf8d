// One peer as the engine's thread sees it: endpoint, channel, reads, digests owed, and its end.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "channel.hpp"
#include "read_job.hpp"
#include "ucx_core.hpp"
#include "ucx_endpoint.hpp"

namespace kvlink {

class UcxPeer;

// A read with what its gets need.
class UcxRead final : public ReadJob {
 public:
  UcxRead(ReadSpec spec, std::shared_ptr<const LocalRegions> to, std::shared_ptr<const RemoteRegions> from)
      : ReadJob(std::move(spec)), local(std::move(to)), remote(std::move(from)) {}

  const std::shared_ptr<const LocalRegions> local;
  const std::shared_ptr<const RemoteRegions> remote;
  UcxPeer* peer = nullptr;
  std::vector<std::uint64_t> cut_offs;  // ops waiting for this read's end
};

// A read ends only when none of its gets is outstanding and, where the endpoint was closed by force, the close has
// completed too: then no byte of it can land. If UCX ever failed to complete them, neither READ nor CUT_OFF would be
// reported, and the blocks would stay with the read: the safe way to be wrong.
class UcxPeer final : private FrameSink {
 public:
  // Takes the channel's descriptor over. Throws UcxError if the address cannot be reached.
  UcxPeer(EngineCore& core, std::string name, Bytes address, std::unique_ptr<Channel> channel);

  const std::string& name() const { return name_; }
  Channel* channel() const { return channel_.get(); }

  void read(std::unique_ptr<UcxRead> read);
  void cut_off(std::uint64_t op, AttemptId attempt);
  void disconnect(std::uint64_t op);  // op 0: nobody asks for its end
  // Reset, silence or a violation. Idempotent.
  void lose(std::string detail);  // by value: it may be the channel's own
  // Its lease of an attempt lapsed: whoever still reads should know.
  void tell_lapsed(AttemptId attempt);
  bool leaving() const { return life_ != Life::up; }

  bool reading() const { return !reads_.empty(); }
  // Each does a bounded piece of work; true if there was any.
  bool post();
  bool verify();
  bool digest();
  void receive();
  void flush();

  // Heartbeats and silence. Returns when to call again.
  Time tick(Time now);
  // Completes what is over, closes by force what is overdue. Returns when to call again at the latest.
  Time settle(Time now);
  // Nothing is left; finish() reports it.
  bool over() const { return leaving() && reads_.empty() && !endpoint_; }
  void finish();

  // Reads, digests or an end under way: the engine's thread looks at idle peers only when they tick.
  bool busy() const {
    return leaving() || !reads_.empty() || !digesting_.empty() || verdict_.has_value() ||
           (endpoint_ && (endpoint_->broken() || endpoint_->closing()));
  }

 private:
  enum class Life { up, lost, disconnecting };

  void on_heartbeat(std::span<const AttemptId> renewed) override;
  void on_want(AttemptId attempt) override;
  void on_leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests) override;
  void on_failed(AttemptId attempt, FailReason reason) override;
  static void on_get(void* request, ucs_status_t status, void* chunk);

  UcxRead* find(AttemptId attempt) const;
  bool endpoint_failed() const;
  bool idle() const;
  bool reachable();
  bool post(UcxRead& read);
  void get(UcxRead& read, ReadJob::Chunk& chunk, const Run& run);
  void renew(Time now);
  void stop_reads(Outcome outcome, const std::string& detail, bool only_started);
  void end_exposures();
  Time judge_endpoint(Time now);
  Time force_overdue(Time now);
  void complete_over(Time now);
  void complete(UcxRead& read, Time now);

  EngineCore& core_;
  const std::string name_;
  const Bytes address_;
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<UcxEndpoint> endpoint_;
  std::vector<std::unique_ptr<UcxRead>> reads_;
  std::size_t turn_ = 0;  // whose read posts, and verifies, first
  std::deque<std::shared_ptr<Exposure>> digesting_;
  std::vector<std::pair<AttemptId, Time>> lingering_;
  std::vector<AttemptId> renewing_;

  Time heard_;
  Time next_heartbeat_;
  std::optional<Time> verdict_;  // when a broken endpoint is held to be UCX's own failure, not the peer's death
  std::string broken_detail_;
  std::string last_error_;       // UCX's word for the last get that failed

  Life life_ = Life::up;
  std::string end_detail_;
  std::vector<std::uint64_t> disconnects_;
};

}  // namespace kvlink
