#include "ucx_peer.hpp"

#include <algorithm>
#include <chrono>

namespace kvlink {
namespace {

using namespace std::chrono_literals;

// One read's share of a turn, so that reads advance together and commands are never far away.
constexpr std::int64_t kPostBytesPerTurn = 4 * 1024 * 1024;
// A process that dies breaks its endpoint and its channel at about the same time; this is how long the channel has to
// say so before the endpoint's failure is taken for UCX's own.
constexpr Duration kVerdict = 100ms;
// A close completes inside UCX's progress, which does not promise to wake us for it.
constexpr Duration kCloseCheck = 1ms;

}  // namespace

UcxPeer::UcxPeer(EngineCore& core, std::string name, Bytes address, std::unique_ptr<Channel> channel)
    : core_(core),
      name_(std::move(name)),
      address_(std::move(address)),
      channel_(std::move(channel)),
      endpoint_(std::make_unique<UcxEndpoint>(core.context, address_)),
      heard_(Clock::now()),
      next_heartbeat_(heard_) {}

// --- verbs ----------------------------------------------------------------------------------------------------------

void UcxPeer::read(std::unique_ptr<UcxRead> read) {
  read->peer = this;
  const AttemptId attempt = read->spec().attempt;
  if (leaving()) {
    read->stop(life_ == Life::lost ? Outcome::peer_lost : Outcome::cut_off, end_detail_);
  } else {
    channel_->heartbeat({&attempt, 1});
    if (read->spec().integrity) channel_->want(attempt);
  }
  reads_.push_back(std::move(read));
}

void UcxPeer::cut_off(std::uint64_t op, AttemptId attempt) {
  std::erase_if(lingering_, [attempt](const auto& entry) { return entry.first == attempt; });
  if (UcxRead* read = find(attempt)) {
    read->stop(Outcome::cut_off, "");
    read->cut_offs.push_back(op);
  } else {
    core_.completions.push({.kind = CompletionKind::cut_off, .op = op, .peer = name_, .attempt = attempt});
  }
}

void UcxPeer::disconnect(std::uint64_t op) {
  disconnects_.push_back(op);
  if (leaving()) return;
  life_ = Life::disconnecting;
  end_detail_ = "disconnected";
  end_exposures();
  stop_reads(Outcome::cut_off, end_detail_, false);
}

void UcxPeer::lose(std::string detail) {
  channel_.reset();
  if (leaving()) return;
  life_ = Life::lost;
  end_detail_ = std::move(detail);
  end_exposures();
  stop_reads(Outcome::peer_lost, end_detail_, false);
  if (endpoint_) endpoint_->close();
}

void UcxPeer::finish() {
  channel_.reset();
  if (life_ == Life::lost) {
    core_.completions.push({.kind = CompletionKind::peer_lost,
                            .peer = name_,
                            .outcome = Outcome::peer_lost,
                            .detail = end_detail_});
  }
  for (const std::uint64_t op : disconnects_) {
    if (op != 0) core_.completions.push({.kind = CompletionKind::disconnected, .op = op, .peer = name_});
  }
}

void UcxPeer::tell_lapsed(AttemptId attempt) {
  if (!leaving()) channel_->failed(attempt, FailReason::lapsed);
}

void UcxPeer::end_exposures() {
  digesting_.clear();
  for (const AttemptId attempt : core_.exposures.lapse_all(name_)) {
    core_.completions.push(
        {.kind = CompletionKind::lease_lapsed, .peer = name_, .attempt = attempt, .detail = end_detail_});
  }
}

void UcxPeer::stop_reads(Outcome outcome, const std::string& detail, bool only_started) {
  for (auto& read : reads_) {
    if (!only_started || read->started()) read->stop(outcome, detail);
  }
}

UcxRead* UcxPeer::find(AttemptId attempt) const {
  const auto found = std::find_if(reads_.begin(), reads_.end(),
                                  [attempt](const auto& read) { return read->spec().attempt == attempt; });
  return found == reads_.end() ? nullptr : found->get();
}

// --- the channel ----------------------------------------------------------------------------------------------------

void UcxPeer::receive() {
  if (!channel_) return;
  channel_->receive(*this);
  if (!channel_->end().empty()) lose(channel_->end());
}

void UcxPeer::flush() {
  if (!channel_) return;
  channel_->flush();
  if (!channel_->end().empty()) lose(channel_->end());
}

// Arrival is stamped here, by this thread's clock. If this process was itself stopped, the gap was real for its leases
// (their blocks' owner may have judged them), but not for the peer, whose frames are waiting in the socket.
void UcxPeer::on_heartbeat(std::span<const AttemptId> renewed) {
  heard_ = Clock::now();
  core_.late.renewals += core_.exposures.renew(name_, renewed, heard_);
}

void UcxPeer::on_want(AttemptId attempt) {
  heard_ = Clock::now();
  auto wanted = core_.exposures.want(name_, attempt, heard_);
  if (wanted.exposure) {
    digesting_.push_back(std::move(wanted.exposure));
  } else {
    ++core_.late.wants;
    channel_->failed(attempt, wanted.reason);
  }
}

void UcxPeer::on_leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests) {
  heard_ = Clock::now();
  if (UcxRead* read = find(attempt)) {
    read->add_leaves(first, digests);
  } else {
    ++core_.late.leaves;
  }
}

void UcxPeer::on_failed(AttemptId attempt, FailReason reason) {
  heard_ = Clock::now();
  if (UcxRead* read = find(attempt)) {
    read->stop(Outcome::source_failed, text(reason));
  } else {
    ++core_.late.failures;
  }
}

bool UcxPeer::digest() {
  if (!channel_ || digesting_.empty() || !channel_->has_room_for_digests()) return false;
  const auto exposure = std::move(digesting_.front());
  digesting_.pop_front();
  const auto slice = core_.exposures.digest(*exposure);
  if (!slice.digests.empty()) channel_->leaves(slice.attempt, slice.first, slice.digests);
  if (slice.reason) channel_->failed(slice.attempt, *slice.reason);
  if (!slice.done) digesting_.push_back(exposure);
  return true;
}

Time UcxPeer::tick(Time now) {
  if (leaving()) return Time::max();
  if (now - heard_ > core_.settings.peer_lost) {
    receive();  // what arrived while this thread was busy, or this process stopped, counts
    if (!leaving() && now - heard_ > core_.settings.peer_lost) {
      const double silence = std::chrono::duration<double>(now - heard_).count();
      lose("silent for " + std::to_string(silence) + " s");
    }
    if (leaving()) return Time::max();
  }
  if (now >= next_heartbeat_) {
    renew(now);
    next_heartbeat_ = now + core_.settings.heartbeat;
  }
  return std::min(next_heartbeat_, heard_ + core_.settings.peer_lost + 1ms);
}

void UcxPeer::renew(Time now) {
  std::erase_if(lingering_, [now](const auto& entry) { return now >= entry.second; });
  renewing_.clear();
  for (const auto& read : reads_) {
    if (!read->stopped()) renewing_.push_back(read->spec().attempt);
  }
  for (const auto& [attempt, until] : lingering_) renewing_.push_back(attempt);
  channel_->heartbeat(renewing_);
}

// --- moving ---------------------------------------------------------------------------------------------------------

bool UcxPeer::reachable() {
  if (endpoint_) return !endpoint_->closing() && !endpoint_->broken();
  try {
    endpoint_ = std::make_unique<UcxEndpoint>(core_.context, address_);
  } catch (const UcxError& error) {
    stop_reads(Outcome::unreachable, error.what(), false);
  }
  return endpoint_ != nullptr;
}

bool UcxPeer::post() {
  if (leaving() || verdict_ || reads_.empty() || !reachable()) return false;
  bool any = false;
  ++turn_;
  for (std::size_t i = 0; i < reads_.size(); ++i) any |= post(*reads_[(turn_ + i) % reads_.size()]);
  return any;
}

bool UcxPeer::post(UcxRead& read) {
  std::int64_t posted = 0;
  Run run;
  while (posted < kPostBytesPerTurn && read.outstanding() < core_.settings.max_gets_per_read) {
    ReadJob::Chunk* chunk = read.next(run);
    if (chunk == nullptr) break;
    get(read, *chunk, run);
    posted += run.bytes;
  }
  return posted > 0;
}

void UcxPeer::get(UcxRead& read, ReadJob::Chunk& chunk, const Run& run) {
  const auto& api = core_.context->api();
  const auto& to = *read.local->regions[static_cast<std::size_t>(run.target_region)];
  const auto& from = read.remote->keys[static_cast<std::size_t>(run.source_region)];
  try {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
    params.cb.send = &UcxPeer::on_get;
    params.user_data = &chunk;
    params.memh = to.handle();
    void* request = api.ucp_get_nbx(endpoint_->handle(), to.data() + run.target_offset,
                                    static_cast<std::size_t>(run.bytes),
                                    from->address + static_cast<std::uint64_t>(run.source_offset),
                                    endpoint_->key(static_cast<std::size_t>(run.source_region), from), &params);
    if (request == nullptr) return read.ended(chunk, true);
    if (!UCS_PTR_IS_ERR(request)) return;  // on_get will end it
    last_error_ = api.text(UCS_PTR_STATUS(request));
  } catch (const UcxError& error) {
    last_error_ = error.what();
  }
  read.ended(chunk, false);
}

void UcxPeer::on_get(void* request, ucs_status_t status, void* chunk_of_read) {
  auto& chunk = *static_cast<ReadJob::Chunk*>(chunk_of_read);
  auto& read = static_cast<UcxRead&>(*chunk.job);
  const auto& api = read.peer->core_.context->api();
  if (status != UCS_OK) read.peer->last_error_ = api.text(status);
  api.ucp_request_free(request);
  read.ended(chunk, status == UCS_OK);
}

bool UcxPeer::verify() {
  for (std::size_t i = 0; i < reads_.size(); ++i) {
    if (reads_[(turn_ + i) % reads_.size()]->verify()) return true;
  }
  return false;
}

// --- ends -----------------------------------------------------------------------------------------------------------

Time UcxPeer::settle(Time now) {
  const Time verdict = judge_endpoint(now);
  const Time force = force_overdue(now);
  complete_over(now);
  const bool closing = endpoint_ && endpoint_->closing();
  return std::min({verdict, force, closing ? now + kCloseCheck : Time::max()});
}

bool UcxPeer::endpoint_failed() const {
  return endpoint_->broken() || std::any_of(reads_.begin(), reads_.end(),
                                            [](const auto& read) { return read->broken() && !read->stopped(); });
}

bool UcxPeer::idle() const {
  return std::all_of(reads_.begin(), reads_.end(), [](const auto& read) { return read->outstanding() == 0; });
}

// A failure of the endpoint alone ends the reads that used it; the next read gets a new one.
Time UcxPeer::judge_endpoint(Time now) {
  if (endpoint_ && !endpoint_->closing() && endpoint_failed()) {
    broken_detail_ = "endpoint broke: " + (endpoint_->broken() ? endpoint_->why() : last_error_);
    endpoint_->close();
    verdict_ = now + kVerdict;
  }
  if (!verdict_) return Time::max();
  if (now < *verdict_) return *verdict_;
  verdict_.reset();
  stop_reads(Outcome::failed, broken_detail_, true);
  return Time::max();
}

// Stopped reads whose gets will not end by themselves: the peer is stopped, or hung.
Time UcxPeer::force_overdue(Time now) {
  if (!endpoint_ || endpoint_->closing()) return Time::max();
  Time next = Time::max();
  for (const auto& read : reads_) {
    if (!read->stopped() || read->outstanding() == 0) continue;
    const Time due = read->stopped_at() + core_.settings.cut_off_grace;
    if (now >= due) {
      endpoint_->close();
      stop_reads(Outcome::failed, "endpoint closed by force to cut off another read from this peer", true);
      return Time::max();
    }
    next = std::min(next, due);
  }
  if (leaving() && idle()) endpoint_->close();
  return next;
}

void UcxPeer::complete_over(Time now) {
  if (endpoint_ && endpoint_->closing()) {
    if (!endpoint_->closed() || !idle()) return;
    endpoint_.reset();
  }
  std::erase_if(reads_, [this, now](const auto& read) {
    if (!read->over()) return false;
    complete(*read, now);
    return true;
  });
}

void UcxPeer::complete(UcxRead& read, Time now) {
  auto end = read.completion();
  const AttemptId attempt = end.attempt;
  if (end.outcome == Outcome::ok && !leaving()) {
    // The commit is yet to come, and may wait for a busy interpreter.
    channel_->heartbeat({&attempt, 1});
    lingering_.emplace_back(attempt, now + core_.settings.renewal_linger);
  }
  core_.active_reads -= 1;
  core_.completions.push(std::move(end));
  for (const std::uint64_t op : read.cut_offs) {
    core_.completions.push({.kind = CompletionKind::cut_off, .op = op, .peer = name_, .attempt = attempt});
  }
}

}  // namespace kvlink
