#include "stream_serve.hpp"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>

#include "carry.hpp"

namespace kvlink {
namespace {

// Runs shorter than this are packed, and digested on the way: one walk over cold memory, which asks ahead for what it
// will read, instead of two that wait for each run. (One core's seconds a GB at the source, so and digested and sent as
// they lie: runs of 4 KiB 0.17 and 0.23, of 64 KiB 0.11 and 0.14, of 1 MiB 0.11 and 0.10.)
constexpr std::int64_t kGatherDigestedBytes = kMaxAskBytes;

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
    } else if (left_.payload == static_cast<std::size_t>(header_.end - loaded_)) {
      load(Exposures::spec_of(*exposure_));
    }
  }
  if (left_.total() == 0) {
    out_.release();
    gathered_.reset();
    return LaneStep::idle;
  }
  // Half a packet waits for what follows at once.
  const bool more = left_.payload > 0 && loaded_ < header_.end && trailer_ == 0;
  const msghdr message = out_.message();
  const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
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
  loaded_ = header_.begin;
  trailer_ = 0;
}

// The next piece, once the last one has left: gathered where its runs are short, else as it lies. Without anything to
// be done with the bytes, all there is.
void Serving::load(const ExposureSpec& spec) {
  const Plan& plan = *spec.plan;
  const bool digested = header_.digests != 0;
  const bool gathered = !has_runs_of(plan, Side::source, digested ? kGatherDigestedBytes : kShortRunBytes);
  const std::int64_t begin = loaded_;
  loaded_ = gathered || digested ? std::min(begin + kPieceBytes, header_.end) : header_.end;
  const auto first = static_cast<std::size_t>((begin - header_.begin) / kLeafBytes);
  const auto leaves = std::span(digests_).subspan(first, digested ? leaf_count(loaded_ - begin) : 0);
  if (gathered) {
    if (!gathered_) gathered_ = std::make_unique_for_overwrite<std::byte[]>(kPieceBytes);
    const Place<const std::byte> from{.regions = spec.regions};
    const Place<std::byte> to{.packed = gathered_.get(), .begin = begin};
    if (digested) {
      carry_and_digest(plan, from, to, begin, loaded_, leaves);
    } else {
      carry(plan, from, to, begin, loaded_);
    }
    out_.add(gathered_.get(), static_cast<std::size_t>(loaded_ - begin));
  } else {
    if (digested) digest_leaves(plan, Side::source, spec.regions, begin / kLeafBytes, leaves);
    out_.add_runs(plan, begin, loaded_, Side::source, spec.regions);
  }
  if (loaded_ == header_.end) end_frame();
}

void Serving::end_frame() {
  const auto leaves = std::span(digests_).first(left_.digests / sizeof(std::uint64_t));
  if (!leaves.empty()) exposures_.record(*exposure_, static_cast<std::size_t>(header_.begin / kLeafBytes), leaves);
  out_.add(digests_.data(), left_.digests);
  out_.add(&trailer_, sizeof trailer_);
}

// The memory must not be read any more, and the frame's length is out already: fill it up, and say so at its end.
void Serving::void_rest(FailReason reason) {
  trailer_ = static_cast<LaneTrailer>(reason);
  out_.clear();
  out_.add_rest(sending_.data(), sending_.size() * sizeof(LaneHeader), left_.asks);
  out_.add_rest(&header_, sizeof header_, left_.header);
  for (std::size_t rest = left_.payload; rest > 0;) {
    const std::size_t part = std::min(rest, kFilling.size());
    out_.add(kFilling.data(), part);
    rest -= part;
  }
  out_.add(digests_.data(), left_.digests);
  out_.add(&trailer_, sizeof trailer_);
}

}  // namespace kvlink
