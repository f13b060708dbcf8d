#include "peer.hpp"

#include <algorithm>
#include <chrono>

namespace kvlink {

using namespace std::chrono_literals;

Peer::Peer(EngineCore& core, std::string name, std::unique_ptr<Channel> channel)
    : channel_(std::move(channel)),
      core_(core),
      name_(std::move(name)),
      heard_(Clock::now()),
      next_heartbeat_(heard_) {}

// --- verbs ----------------------------------------------------------------------------------------------------------

void Peer::read(std::shared_ptr<ActiveRead> read) {
  ActiveRead& started = *reads_.emplace_back(std::move(read));
  if (leaving()) return started.stop(lost() ? Outcome::peer_lost : Outcome::cut_off, end_detail_);
  begin(started);
  next_heartbeat_ = std::min(next_heartbeat_, Clock::now() + core_.limits.heartbeat / 16);
}

void Peer::cut_off(std::uint64_t op, AttemptId attempt) {
  forget(attempt);
  if (ActiveRead* read = find(attempt)) {
    read->stop(Outcome::cut_off, "");
    read->cut_offs.push_back(op);
  } else {
    core_.completions.push({.kind = CompletionKind::cut_off, .op = op, .peer = name_, .attempt = attempt});
  }
}

void Peer::forget(AttemptId attempt) {
  std::erase_if(lingering_, [attempt](const auto& entry) { return entry.first == attempt; });
}

void Peer::disconnect(std::uint64_t op) {
  disconnects_.push_back(op);
  if (!leaving()) leave(Life::disconnecting, "disconnected", Outcome::cut_off);
}

void Peer::lose(std::string detail) {
  channel_.reset();
  if (!leaving()) leave(Life::lost, std::move(detail), Outcome::peer_lost);
}

void Peer::leave(Life life, std::string detail, Outcome outcome) {
  life_ = life;
  end_detail_ = std::move(detail);
  for (const AttemptId attempt : core_.exposures.lapse_all(name_)) {
    core_.completions.push(
        {.kind = CompletionKind::lease_lapsed, .peer = name_, .attempt = attempt, .detail = end_detail_});
  }
  for (auto& read : reads_) read->stop(outcome, end_detail_);
  on_leaving();
}

void Peer::finish() {
  channel_.reset();
  if (lost()) {
    core_.completions.push({.kind = CompletionKind::peer_lost,
                            .peer = name_,
                            .outcome = Outcome::peer_lost,
                            .detail = end_detail_});
  }
  for (const std::uint64_t op : disconnects_) {
    if (op != 0) core_.completions.push({.kind = CompletionKind::disconnected, .op = op, .peer = name_});
  }
}

void Peer::tell_lapsed(AttemptId attempt) {
  if (!leaving()) channel_->failed(attempt, FailReason::lapsed);
}

ActiveRead* Peer::find(AttemptId attempt) const {
  const auto found = std::find_if(reads_.begin(), reads_.end(),
                                  [attempt](const auto& read) { return read->spec().attempt == attempt; });
  return found == reads_.end() ? nullptr : found->get();
}

// --- the channel ----------------------------------------------------------------------------------------------------

void Peer::receive() {
  if (!channel_) return;
  channel_->receive(*this);
  if (!channel_->end().empty()) lose(channel_->end());
}

void Peer::flush() {
  if (!channel_) return;
  channel_->flush();
  if (!channel_->end().empty()) lose(channel_->end());
}

// Arrival is stamped here, by this thread's clock. If this process was itself stopped, the gap was real for its leases
// (their blocks' owner may have judged them), but not for the peer, whose frames are waiting in the socket.
void Peer::on_heartbeat(std::span<const AttemptId> renewed) {
  heard();
  core_.late.renewals += core_.exposures.renew(name_, renewed, heard_);
}

void Peer::on_want(AttemptId) { throw ProtocolViolation("digests wanted of a transport that sends them by itself"); }

void Peer::on_leaves(AttemptId, std::uint64_t, std::span<const std::uint64_t>) {
  throw ProtocolViolation("digests that nobody wanted");
}

void Peer::on_ring_wanted(std::uint64_t) { throw ProtocolViolation("ring wanted of a transport that has none"); }

void Peer::on_ring(const RingOffer&) { throw ProtocolViolation("a ring that nobody wanted"); }

void Peer::on_pack(const PackAsk&) { throw ProtocolViolation("packing asked of a transport that does none"); }

void Peer::on_packed(const PackAnswer&) { throw ProtocolViolation("packed bytes that nobody asked for"); }

void Peer::on_failed(AttemptId attempt, FailReason reason) {
  heard();
  if (ActiveRead* read = find(attempt)) {
    read->stop(Outcome::source_failed, text(reason));
  } else {
    ++core_.late.failures;
  }
}

Time Peer::tick(Time now) {
  if (leaving()) return Time::max();
  if (now - heard_ > core_.limits.peer_lost) {
    receive();  // what arrived while this thread was busy, or this process stopped, counts
    if (!leaving() && now - heard_ > core_.limits.peer_lost) {
      const double silence = std::chrono::duration<double>(now - heard_).count();
      lose("silent for " + std::to_string(silence) + " s");
    }
    if (leaving()) return Time::max();
  }
  if (now >= next_heartbeat_) {
    renew(now);
    next_heartbeat_ = now + core_.limits.heartbeat;
  }
  return std::min(next_heartbeat_, heard_ + core_.limits.peer_lost + 1ms);
}

void Peer::renew(Time now) {
  std::erase_if(lingering_, [now](const auto& entry) { return now >= entry.second; });
  renewing_.clear();
  for (const auto& read : reads_) {
    if (!read->stopped()) renewing_.push_back(read->spec().attempt);
  }
  for (const auto& [attempt, until] : lingering_) renewing_.push_back(attempt);
  channel_->heartbeat(renewing_);
}

// --- ends -----------------------------------------------------------------------------------------------------------

Time Peer::settle(Time now) {
  complete_over(now);
  return Time::max();
}

void Peer::complete_over(Time now) {
  std::erase_if(reads_, [this, now](const auto& read) {
    if (!read->over()) return false;
    complete(*read, now);
    return true;
  });
}

void Peer::complete(ActiveRead& read, Time now) {
  ended(read);
  auto end = read.completion();
  const AttemptId attempt = end.attempt;
  if (end.outcome == Outcome::ok && !leaving()) {
    // The commit is yet to come, and may wait for a busy interpreter.
    lingering_.emplace_back(attempt, now + core_.limits.renewal_linger);
  }
  core_.active_reads -= 1;
  core_.completions.push(std::move(end));
  for (const std::uint64_t op : read.cut_offs) {
    core_.completions.push({.kind = CompletionKind::cut_off, .op = op, .peer = name_, .attempt = attempt});
  }
}

}  // namespace kvlink
