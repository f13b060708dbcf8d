#include "stream_serve.hpp"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>

namespace kvlink {
namespace {

constexpr std::array<std::byte, 64 * 1024> kFilling{};  // stands in for bytes that may not be read any more

}  // namespace

void Serving::accept(const LaneHeader& header) {
  if (accepted_.size() + (exposure_ ? 1 : 0) >= kMaxAsks) {
    throw ProtocolViolation("more than " + std::to_string(kMaxAsks) + " asks at a time");
  }
  if (!header.is_ask()) {
    throw ProtocolViolation("ask for bytes " + std::to_string(header.begin) + " to " + std::to_string(header.end));
  }
  accepted_.push_back(header);
}

LaneStep Serving::step(int fd) {
  if (left_.total() == 0) begin();
  Exposures::Look look;
  if (left_.payload > 0 && trailer_ == 0) {
    look = exposures_.look(*exposure_, Clock::now());
    if (!look) {
      void_rest(look.reason);
    } else if (!digested_) {
      digest(Exposures::spec_of(*exposure_));
    }
  }
  fill();
  if (left_.total() == 0) {
    out_.release();
    return LaneStep::idle;
  }
  const msghdr message = out_.message();
  const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return LaneStep::blocked;
    if (errno == EINTR) return LaneStep::more;
    throw LaneBroken(std::string("lane broke: ") + strerror(errno));
  }
  out_.consume(static_cast<std::size_t>(sent));
  left_.pass(static_cast<std::size_t>(sent));
  if (left_.total() == 0) exposure_.reset();
  return idle() ? LaneStep::idle : LaneStep::more;
}

// At a border between frames: our asks go first, then the answer to the next ask of theirs.
void Serving::begin() {
  sending_.swap(asks_);
  asks_.clear();
  left_.asks = sending_.size() * sizeof(LaneHeader);
  out_.add(sending_.data(), left_.asks);
  if (accepted_.empty()) return;
  header_ = accepted_.front();
  accepted_.pop_front();
  header_.word = LaneWord::frame;
  left_.header = sizeof header_;
  out_.add(&header_, sizeof header_);
  auto found = exposures_.find_held(peer_, header_.attempt, Clock::now());
  if (!found.exposure) {
    header_.reason = static_cast<std::uint32_t>(found.reason);
    return;
  }
  const Plan& plan = *Exposures::spec_of(*found.exposure).plan;
  if (header_.end > plan.total_bytes() || (header_.end % kLeafBytes != 0 && header_.end != plan.total_bytes())) {
    throw ProtocolViolation("ask for bytes up to " + std::to_string(header_.end) + " of attempt " +
                            std::to_string(header_.attempt) + ", which has " + std::to_string(plan.total_bytes()));
  }
  exposure_ = std::move(found.exposure);
  left_.add_body(header_);
  out_.add(digests_.data(), left_.digests);
  cursor_.emplace(plan, header_.begin, header_.end, Walk::source);
  digested_ = header_.digests == 0;
  closed_ = false;
  trailer_ = 0;
}

void Serving::digest(const ExposureSpec& spec) {
  const std::int64_t first = header_.begin / kLeafBytes;
  const auto leaves = std::span(digests_).first(left_.digests / sizeof(std::uint64_t));
  digest_leaves(*spec.plan, Side::source, spec.regions, first, leaves);
  exposures_.record(*exposure_, static_cast<std::size_t>(first), leaves);
  digested_ = true;
}

// The memory must not be read any more, and the frame's length is out already: fill it up, and say so at its end.
void Serving::void_rest(FailReason reason) {
  trailer_ = static_cast<LaneTrailer>(reason);
  cursor_.reset();
  closed_ = true;
  out_.clear();
  FrameLeft whole{};
  whole.add_body(header_);
  out_.add_rest(sending_.data(), sending_.size() * sizeof(LaneHeader), left_.asks);
  out_.add_rest(&header_, sizeof header_, left_.header);
  out_.add_rest(digests_.data(), whole.digests, left_.digests);
  for (std::size_t payload = left_.payload; payload > 0;) {
    const std::size_t part = std::min(payload, kFilling.size());
    out_.add(kFilling.data(), part);
    payload -= part;
  }
  out_.add(&trailer_, sizeof trailer_);
}

// Runs are added a call's worth at a time, and the trailer behind the last one.
void Serving::fill() {
  if (left_.trailer == 0 || closed_) return;
  if (cursor_) {
    if (!out_.half_empty()) return;
    if (out_.add_runs(*cursor_, Side::source, Exposures::spec_of(*exposure_).regions, 1)) return;
    cursor_.reset();
  }
  out_.add(&trailer_, sizeof trailer_);
  closed_ = true;
}

}  // namespace kvlink
