#include "stream_land.hpp"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>

#include "carry.hpp"

namespace kvlink {
namespace {

// A sleeping mover is woken for this much of a frame, not for every packet of it.
constexpr std::size_t kLowWaterBytes = 256 * 1024;

// Runs shorter than this are received packed, and digested on the way to where they belong. (One core's seconds a GB at
// the target, so and received where they belong and digested there: strided runs of 2 KiB 0.13 and 0.16, runs of 16 KiB
// 0.13 and 0.13.)
constexpr std::int64_t kScatterDigestedBytes = 8192;


}  // namespace

Landing::Heard Landing::step(int fd, std::span<std::byte> scratch) {
  Heard heard;
  AskedRead* const landing = left_.total() > 0 && !dropping_ ? asked_.front().read.get() : nullptr;
  const bool inside = landing != nullptr && landing->enter();
  if (landing != nullptr && !inside) {
    dropping_ = true;
    in_.clear();
  }
  if (left_.total() > 0 && dropping_) {
    drain(scratch);
  } else {
    fill();
  }
  const FrameLeft before = left_;
  try {
    heard.step = receive(fd);
    if (inside && left_.payload < before.payload) settle();
    if (before.total() > 0 && left_.total() == 0) {
      if (inside && finish_frame()) demand_.add(asked_.front().read);
      heard.answered = true;
    }
  } catch (...) {
    if (inside) landing->exit();
    throw;
  }
  if (inside) heard.over = landing->exit();
  if (heard.answered) asked_.pop_front();
  if (header_left_ == 0) read_header(heard);
  if (heard.step == LaneStep::blocked) expect_at_least(fd, left_.total());
  return heard;
}

// In order: the next piece of the frame, its end, the next header. One call serves as many of them as it can.
void Landing::fill() {
  if (!in_.empty()) return;
  if (left_.payload > 0) {
    const auto& [read, stretch] = asked_.front();
    const ReadSpec& spec = read->spec();
    const bool whole = !scattering_ && !spec.integrity;
    piece_.begin = stretch.end - static_cast<std::int64_t>(left_.payload);
    piece_.end = whole ? stretch.end : std::min(piece_.begin + kPieceBytes, stretch.end);
    if (scattering_) {
      in_.add(scattered_.get(), static_cast<std::size_t>(piece_.end - piece_.begin));
    } else {
      in_.add_runs(*spec.plan, piece_.begin, piece_.end, Side::target, spec.regions);
    }
    if (piece_.end < stretch.end) return;
  } else if (asked_.empty()) {
    in_.release();
    scattered_.reset();
  }
  if (left_.total() > 0) {
    in_.add(theirs_.data(), left_.digests);
    in_.add(&trailer_, sizeof trailer_);
  }
  header_left_ = sizeof header_;
  in_.add(&header_, sizeof header_);
}

// The rest of the frame alone: the header behind it is for the call after.
void Landing::drain(std::span<std::byte> scratch) {
  in_.clear();
  in_.add(scratch.data(), std::min(scratch.size(), left_.total()));
}

LaneStep Landing::receive(int fd) {
  msghdr message = in_.message();
  const ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT);
  if (got == 0) throw LaneBroken("lane closed by the peer");
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return LaneStep::blocked;
    if (errno == EINTR) return LaneStep::more;
    throw LaneBroken(std::string("lane broke: ") + strerror(errno));
  }
  in_.consume(static_cast<std::size_t>(got));
  header_left_ -= left_.pass(static_cast<std::size_t>(got));
  return in_.empty() ? LaneStep::more : LaneStep::blocked;  // a short call has emptied the socket
}

void Landing::read_header(Heard& heard) {
  const LaneHeader header = header_;
  header_left_ = sizeof header_;
  if (header.word == LaneWord::ask) {
    heard.ask = header;
    return;
  }
  if (asked_.empty()) throw ProtocolViolation("a frame that nobody asked for");
  const auto& [read, stretch] = asked_.front();
  const bool answers = header.word == LaneWord::frame && header.attempt == read->spec().attempt &&
                       header.begin == stretch.begin && header.end == stretch.end &&
                       header.digests == (read->spec().integrity ? 1 : 0);
  if (!answers) {
    throw ProtocolViolation("a frame of attempt " + std::to_string(header.attempt) + " that answers another ask");
  }
  if (header.reason != 0) {
    read->stop(Outcome::source_failed, text(static_cast<FailReason>(header.reason)));
    heard.over = heard.over || read->over();
    heard.answered = true;
    asked_.pop_front();
    return;
  }
  begin_frame();
}

void Landing::begin_frame() {
  const ReadSpec& spec = asked_.front().read->spec();
  left_.add_body(header_);
  const std::int64_t run_bytes = spec.integrity ? kScatterDigestedBytes : kShortRunBytes;
  scattering_ = spec.plan->converts() || !has_runs_of(*spec.plan, Side::target, run_bytes);
  if (scattering_ && !scattered_) scattered_ = std::make_unique_for_overwrite<std::byte[]>(kPieceBytes);
  settling_ = {};
  dropping_ = false;
}

// A piece that is whole is in the cache still: it is brought to where it belongs, and digested.
void Landing::settle() {
  const auto& [read, stretch] = asked_.front();
  if (stretch.end - static_cast<std::int64_t>(left_.payload) < piece_.end) return;
  const ReadSpec& spec = read->spec();
  const Time began = Clock::now();
  const auto first = static_cast<std::size_t>((piece_.begin - stretch.begin) / kLeafBytes);
  const auto count = static_cast<std::size_t>(spec.integrity ? leaf_count(piece_.end - piece_.begin) : 0);
  const auto leaves = std::span(ours_).subspan(first, count);
  const Place<const std::byte> from{.packed = scattered_.get(), .begin = piece_.begin};
  const Place<std::byte> to{.regions = spec.regions};
  const CarryOptions options{.stores = Stores::streamed};
  if (scattering_ && spec.integrity) {
    carry_and_digest(*spec.plan, from, to, piece_.begin, piece_.end, leaves, options);
  } else if (scattering_) {
    carry(*spec.plan, from, to, piece_.begin, piece_.end, options);
  } else if (spec.integrity) {
    digest_leaves(*spec.plan, Side::target, spec.regions, piece_.begin / kLeafBytes, leaves);
  }
  settling_ += Clock::now() - began;
}

// All of it is in memory. True if the read has something to ask for again.
bool Landing::finish_frame() {
  const auto& [read, stretch] = asked_.front();
  if (trailer_ != 0) {
    read->stop(Outcome::source_failed, text(static_cast<FailReason>(trailer_)));
    return false;
  }
  const auto leaves = static_cast<std::size_t>(read->spec().integrity ? leaf_count(stretch.end - stretch.begin) : 0);
  return read->landed(stretch, std::span(theirs_).first(leaves), std::span(ours_).first(leaves), settling_);
}

// TCP reports the socket readable only from there on; a Unix socket does so at once, and that is well.
void Landing::expect_at_least(int fd, std::size_t bytes) {
  const int wanted = static_cast<int>(std::clamp(bytes, std::size_t{1}, kLowWaterBytes));
  if (wanted == low_water_) return;
  low_water_ = wanted;
  setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
}

}  // namespace kvlink
