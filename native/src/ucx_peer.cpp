#include "ucx_peer.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

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

UcxPeer::UcxPeer(UcxCore& core, std::string name, Bytes address, std::unique_ptr<Channel> channel)
    : Peer(core, std::move(name), std::move(channel)),
      core_(core),
      address_(std::move(address)),
      endpoint_(std::make_unique<UcxEndpoint>(core.context, address_)),
      pulling_(core),
      turns_(core.pace) {}

UcxPeer::~UcxPeer() {
  serving_.reset();
  if (ring_) core_.rings->take_back(std::move(ring_));
}

void UcxPeer::begin(ActiveRead& read) {
  if (read.spec().packed) return begin_packed(static_cast<UcxPackedRead&>(read));
  static_cast<UcxDirectRead&>(read).peer = this;
  if (read.spec().integrity) channel_->want(read.spec().attempt);
}

void UcxPeer::on_leaving() {
  owed_.clear();
  serving_.reset();
  pulling_.abandon();
  if (lost() && endpoint_) endpoint_->close();
}

// --- digests --------------------------------------------------------------------------------------------------------

void UcxPeer::on_want(AttemptId attempt) {
  heard();
  if (core_.settings.gpu) {  // digests of what lies there come with the packed bytes
    channel_->failed(attempt, FailReason::unknown);
  } else if (!owed_.want(core_.exposures, *channel_, name(), attempt)) {
    ++core_.late.wants;
  }
}

void UcxPeer::on_leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests) {
  heard();
  if (ActiveRead* read = find(attempt)) {
    if (read->spec().packed) return Peer::on_leaves(attempt, first, digests);
    static_cast<UcxDirectRead&>(*read).add_leaves(first, digests);
  } else {
    ++core_.late.leaves;
  }
}

bool UcxPeer::digest() {
  return channel_ && owed_.pay(core_.exposures, *channel_);
}

// --- packing --------------------------------------------------------------------------------------------------------

void UcxPeer::begin_packed(UcxPackedRead& read) {
  read.pulling = &pulling_;
  try {
    core_.staging();
  } catch (const std::exception& error) {
    return read.stop(Outcome::failed, std::string("no staging memory: ") + error.what());
  }
  pulling_.add(std::static_pointer_cast<UcxPackedRead>(reads_.back()));
  if (!std::exchange(pulling_.wanted, true)) channel_->ring_wanted(core_.settings.ring_slots);
}

void UcxPeer::on_ring_wanted(std::uint64_t slots) {
  heard();
  if (ring_ || slots == 0) throw ProtocolViolation("ring wanted twice, or of no slots");
  try {
    ring_ = core_.rings->lend();
    const std::size_t count = std::min<std::size_t>(slots, ring_->slots().count());
    channel_->ring({count, std::uint64_t{kSlotBytes}, ring_->handle()});
    serving_.emplace(core_.exposures, *core_.packer, name(), Slots(ring_->slots().at(0), count));
  } catch (const std::exception&) {
    if (ring_) core_.rings->take_back(std::move(ring_));
    channel_->ring({});  // its reads end, and say that we have none
  }
}

void UcxPeer::on_ring(const RingOffer& offer) {
  heard();
  if (offer.slots > 0) return pulling_.open(offer);
  if (!std::exchange(pulling_.wanted, false)) throw ProtocolViolation("a ring that nobody wanted");
  for (auto& read : reads_) {
    if (read->spec().packed) read->stop(Outcome::failed, "the source has no memory for another ring to pack into");
  }
}

void UcxPeer::on_pack(const PackAsk& ask) {
  heard();
  if (!serving_) throw ProtocolViolation("pack without a ring");
  serving_->accept(ask);
}

void UcxPeer::on_packed(const PackAnswer& answer) {
  heard();
  pulling_.packed(answer);
}

bool UcxPeer::pack() {
  if (!channel_ || !serving_ || !serving_->busy()) return false;
  try {
    return serving_->step(*channel_);
  } catch (const std::exception& error) {
    lose(std::string("packing failed: ") + error.what());
    return true;
  }
}

// --- moving ---------------------------------------------------------------------------------------------------------

bool UcxPeer::reachable() {
  if (endpoint_) return !endpoint_->closing() && !endpoint_->broken();
  try {
    endpoint_ = std::make_unique<UcxEndpoint>(core_.context, address_);
  } catch (const UcxError& error) {
    for (auto& read : reads_) read->stop(Outcome::unreachable, error.what());
  }
  return endpoint_ != nullptr;
}

bool UcxPeer::post() {
  pulling_.drop_stopped();
  if (leaving() || verdict_ || reads_.empty() || !reachable()) return false;
  bool any = pulling_.ask(*channel_);
  any |= pulling_.post(*endpoint_);
  ++turn_;
  for (std::size_t i = 0; i < reads_.size(); ++i) {
    ActiveRead& read = read_at(turn_ + i);
    if (!read.spec().packed) any |= post(static_cast<UcxDirectRead&>(read));
  }
  return any;
}

bool UcxPeer::post(UcxDirectRead& read) {
  std::int64_t posted = 0;
  Run run;
  while (posted < kPostBytesPerTurn && read.outstanding() < core_.settings.max_gets_per_read && read.more() &&
         turns_.may_ask()) {
    ReadJob::Chunk* chunk = read.next(run);
    if (chunk == nullptr) break;
    get(read, *chunk, run);
    posted += run.bytes;
    turns_.asked(run.bytes);
  }
  return posted > 0;
}

void UcxPeer::get(UcxDirectRead& read, ReadJob::Chunk& chunk, const Run& run) {
  const auto& api = core_.context->api();
  const auto& to = *static_cast<const UcxRegion*>(read.local->held[static_cast<std::size_t>(run.target_region)].get());
  const auto from =
      std::static_pointer_cast<const RemoteKey>(read.remote->held[static_cast<std::size_t>(run.source_region)]);
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
  auto& read = static_cast<UcxDirectRead&>(*chunk.job);
  const auto& api = read.peer->core_.context->api();
  if (status != UCS_OK) read.peer->last_error_ = api.text(status);
  api.ucp_request_free(request);
  read.ended(chunk, status == UCS_OK);
}

bool UcxPeer::verify() {
  for (std::size_t i = 0; i < reads_.size(); ++i) {
    ActiveRead& read = read_at(turn_ + i);
    if (!read.spec().packed && static_cast<UcxDirectRead&>(read).verify()) return true;
  }
  return pulling_.step();
}

// --- ends -----------------------------------------------------------------------------------------------------------

Time UcxPeer::settle(Time now) {
  const Time verdict = judge_endpoint(now);
  const Time force = force_overdue(now);
  complete_unless_closing(now);
  const bool closing = endpoint_ && endpoint_->closing();
  return std::min({verdict, force, closing ? now + kCloseCheck : Time::max()});
}

bool UcxPeer::endpoint_failed() const {
  return endpoint_->broken() || std::any_of(reads_.begin(), reads_.end(), [](const auto& read) {
           return UcxRead::of(*read).broken() && !read->stopped();
         });
}

bool UcxPeer::idle() const {
  return std::all_of(reads_.begin(), reads_.end(),
                     [](const auto& read) { return UcxRead::of(*read).gets() == 0; });
}

// A failure of the endpoint alone ends the reads that used it; the next read gets a new one.
Time UcxPeer::judge_endpoint(Time now) {
  if (endpoint_ && !endpoint_->closing() && endpoint_failed()) {
    const std::string& last = last_error_.empty() ? pulling_.last_error() : last_error_;
    broken_detail_ = "endpoint broke: " + (endpoint_->broken() ? endpoint_->why() : last);
    endpoint_->close();
    verdict_ = now + kVerdict;
  }
  if (!verdict_) return Time::max();
  if (now < *verdict_) return *verdict_;
  verdict_.reset();
  stop_started(Outcome::failed, broken_detail_);
  return Time::max();
}

// Stopped reads whose gets will not end by themselves: the peer is stopped, or hung.
Time UcxPeer::force_overdue(Time now) {
  if (!endpoint_ || endpoint_->closing()) return Time::max();
  Time next = Time::max();
  for (const auto& read : reads_) {
    if (!read->stopped() || UcxRead::of(*read).gets() == 0) continue;
    const Time due = read->stopped_at() + core_.settings.cut_off_grace;
    if (now >= due) {
      endpoint_->close();
      stop_started(Outcome::failed, "endpoint closed by force to cut off another read from this peer");
      return Time::max();
    }
    next = std::min(next, due);
  }
  if (leaving() && idle()) endpoint_->close();
  return next;
}

void UcxPeer::stop_started(Outcome outcome, const std::string& detail) {
  for (auto& read : reads_) {
    if (UcxRead::of(*read).started()) read->stop(outcome, detail);
  }
}

void UcxPeer::complete_unless_closing(Time now) {
  if (endpoint_ && endpoint_->closing()) {
    if (!endpoint_->closed() || !idle()) return;
    endpoint_.reset();
  }
  complete_over(now);
}

}  // namespace kvlink
