#include "stream_land.hpp"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>

#include "packer.hpp"

namespace kvlink {
namespace {

// A sleeping mover is woken for this much of a frame, not for every packet of it.
constexpr std::size_t kLowWaterBytes = 512 * 1024;

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
  const bool framed = left_.total() > 0;
  try {
    heard.step = receive(fd);
    if (framed && left_.total() == 0) {
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

// In order: what is left of the frame, then the next header, so that one call serves both.
void Landing::fill() {
  if (closed_) return;
  if (left_.total() == 0) {
    if (asked_.empty()) {
      in_.release();
      staging_.reset();
    }
  } else {
    if (cursor_) {
      if (!in_.half_empty()) return;
      if (in_.add_runs(*cursor_, Side::target, asked_.front().read->spec().regions, 2)) return;
      cursor_.reset();
    }
    in_.add(&trailer_, sizeof trailer_);
  }
  header_left_ = sizeof header_;
  in_.add(&header_, sizeof header_);
  closed_ = true;
}

// The rest of the frame alone: the header behind it is for the call after.
void Landing::drain(std::span<std::byte> scratch) {
  in_.clear();
  in_.add(scratch.data(), std::min(scratch.size(), left_.total()));
  closed_ = false;
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
  closed_ = false;
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
  const auto& [read, stretch] = asked_.front();
  left_.add_body(header_);
  in_.add(theirs_.data(), left_.digests);
  if (read->spec().plan->converts()) {
    if (!staging_) staging_ = std::make_unique_for_overwrite<std::byte[]>(kMaxAskBytes);
    in_.add(staging_.get(), left_.payload);
    cursor_.reset();
  } else {
    cursor_.emplace(*read->spec().plan, stretch.begin, stretch.end, Walk::target);
  }
  dropping_ = false;
}

// What was to be converted has come as it is stored at the source; it is digested so, too.
void Landing::unpack(AskedRead& read, Stretch stretch, std::span<std::uint64_t> leaves) {
  const ReadSpec& spec = read.spec();
  const auto job = HostPacker().scatter({*spec.plan, stretch.begin, stretch.end, leaves}, staging_.get(), spec.regions);
  while (job->step() != PackJob::Step::done) continue;
}

// All of it is in memory, and in the cache still. True if the read has something to ask for again.
bool Landing::finish_frame() {
  const auto& [read, stretch] = asked_.front();
  if (trailer_ != 0) {
    read->stop(Outcome::source_failed, text(static_cast<FailReason>(trailer_)));
    return false;
  }
  const bool digested = read->spec().integrity;
  const auto leaves = static_cast<std::size_t>(digested ? leaf_count(stretch.end - stretch.begin) : 0);
  const auto ours = std::span(ours_).first(leaves);
  const Time began = Clock::now();
  if (read->spec().plan->converts()) {
    unpack(*read, stretch, ours);
  } else if (digested) {
    digest_leaves(*read->spec().plan, Side::target, read->spec().regions, stretch.begin / kLeafBytes, ours);
  }
  return read->landed(stretch, std::span(theirs_).first(leaves), ours, Clock::now() - began);
}

// TCP reports the socket readable only from there on; a Unix socket does so at once, and that is well.
void Landing::expect_at_least(int fd, std::size_t bytes) {
  const int wanted = static_cast<int>(std::clamp(bytes, std::size_t{1}, kLowWaterBytes));
  if (wanted == low_water_) return;
  low_water_ = wanted;
  setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
}

}  // namespace kvlink
