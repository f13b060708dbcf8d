#include "channel.hpp"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

namespace kvlink {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are copied as they lie");

struct Header {
  std::uint16_t type;
  std::uint16_t zero;
  std::uint32_t payload_bytes;
};
static_assert(sizeof(Header) == 8);

constexpr std::size_t kMaxPayloadBytes = 16 + 8 * Channel::kMaxDigestsPerFrame;
constexpr std::size_t kReceiveBytes = 4 * (sizeof(Header) + kMaxPayloadBytes);
constexpr int kReceivesPerCall = 16;  // so that one talkative peer cannot hold the thread

std::string errno_text(const char* what) { return std::string(what) + ": " + strerror(errno); }

}  // namespace

const char* text(FailReason reason) {
  switch (reason) {
    case FailReason::unknown: return "the source does not know this attempt";
    case FailReason::lapsed: return "the source's lease lapsed";
    case FailReason::withdrawn: return "the source withdrew the attempt";
    case FailReason::not_packed: return "the source could not pack the bytes";
  }
  return "the source gave an unknown reason";
}

Channel::Channel(int fd) : fd_(fd), in_(kReceiveBytes) {
  const int flags = fcntl(fd_, F_GETFL);
  if (flags < 0 || fcntl(fd_, F_SETFL, flags | O_NONBLOCK) < 0) end_ = errno_text("channel cannot be used");
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // a Unix socket refuses this, and needs none
}

Channel::~Channel() {
  if (fd_ >= 0) close(fd_);
}

bool Channel::receive(FrameSink& sink) {
  for (int i = 0; i < kReceivesPerCall && end_.empty(); ++i) {
    const ssize_t n = recv(fd_, in_.data() + held_, in_.size() - held_, 0);
    if (n == 0) {
      end_ = "channel closed by the peer";
    } else if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
      end_ = errno_text("channel broke");
    } else {
      held_ += static_cast<std::size_t>(n);
      try {
        const std::size_t used = dispatch({in_.data(), held_}, sink);
        memmove(in_.data(), in_.data() + used, held_ - used);
        held_ -= used;
      } catch (const ProtocolViolation& violation) {
        end_ = std::string("protocol violation on the channel: ") + violation.what();
      }
    }
  }
  return end_.empty();
}

std::size_t Channel::dispatch(std::span<const std::byte> bytes, FrameSink& sink) {
  std::size_t at = 0;
  while (bytes.size() - at >= sizeof(Header)) {
    Header header;
    memcpy(&header, bytes.data() + at, sizeof header);
    if (header.zero != 0 || header.type < 1 || header.type > static_cast<std::uint16_t>(Type::packed)) {
      throw ProtocolViolation("unknown frame type " + std::to_string(header.type));
    }
    if (header.payload_bytes > kMaxPayloadBytes || header.payload_bytes % 8 != 0 || header.payload_bytes == 0) {
      throw ProtocolViolation("frame of " + std::to_string(header.payload_bytes) + " bytes");
    }
    if (bytes.size() - at - sizeof header < header.payload_bytes) break;
    words_.resize(header.payload_bytes / 8);
    memcpy(words_.data(), bytes.data() + at + sizeof header, header.payload_bytes);
    deliver(static_cast<Type>(header.type), words_, sink);
    at += sizeof header + header.payload_bytes;
  }
  return at;
}

void Channel::deliver(Type type, std::span<const std::uint64_t> words, FrameSink& sink) {
  switch (type) {
    case Type::heartbeat:
      if (words[0] != words.size() - 1 || words[0] > kMaxAttemptsPerHeartbeat) {
        throw ProtocolViolation("heartbeat that miscounts its attempts");
      }
      return sink.on_heartbeat(words.subspan(1));
    case Type::want:
      if (words.size() != 1) throw ProtocolViolation("want of the wrong size");
      return sink.on_want(words[0]);
    case Type::leaves:
      if (words.size() < 3) throw ProtocolViolation("leaves without a digest");
      return sink.on_leaves(words[0], words[1], words.subspan(2));
    case Type::failed:
      if (words.size() != 2 || words[1] > 0xffffffffu) throw ProtocolViolation("failure of the wrong size");
      return sink.on_failed(words[0], static_cast<FailReason>(words[1]));
    default: return deliver_packing(type, words, sink);
  }
}

void Channel::deliver_packing(Type type, std::span<const std::uint64_t> words, FrameSink& sink) {
  switch (type) {
    case Type::ring_wanted:
      if (words.size() != 1) throw ProtocolViolation("wish for a ring of the wrong size");
      return sink.on_ring_wanted(words[0]);
    case Type::ring: {
      if (words.size() < 3 || words[2] > kMaxHandleBytes || (words[2] + 7) / 8 != words.size() - 3) {
        throw ProtocolViolation("ring that miscounts its handle");
      }
      return sink.on_ring({words[0], words[1], std::as_bytes(words.subspan(3)).first(words[2])});
    }
    case Type::pack:
      if (words.size() != 5 || words[4] > 1) throw ProtocolViolation("pack of the wrong size");
      return sink.on_pack({words[0], static_cast<std::int64_t>(words[1]), static_cast<std::int64_t>(words[2]), words[3],
                           words[4] == 1});
    default:
      if (words.size() < 4 || words[3] > 0xffffffffu) throw ProtocolViolation("packed of the wrong size");
      return sink.on_packed({words[0], static_cast<std::int64_t>(words[1]), words[2],
                             static_cast<std::uint32_t>(words[3]), words.subspan(4)});
  }
}

void Channel::flush() {
  while (end_.empty() && wants_write()) {
    const ssize_t n = send(fd_, out_.data() + sent_, queued(), MSG_NOSIGNAL);
    if (n >= 0) {
      sent_ += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      end_ = errno_text("channel broke");
    }
  }
  if (sent_ == out_.size() || sent_ > kDigestRoomBytes) {
    out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(sent_));
    sent_ = 0;
  }
}

void Channel::queue(Type type, std::span<const std::uint64_t> head, std::span<const std::uint64_t> body) {
  const Header header{static_cast<std::uint16_t>(type), 0, static_cast<std::uint32_t>(8 * (head.size() + body.size()))};
  if (!end_.empty()) return;
  if (queued() + sizeof header + header.payload_bytes > kMaxQueuedBytes) {
    if (type != Type::heartbeat) end_ = "the peer does not read its channel";
    return;
  }
  const auto append = [this](const void* data, std::size_t bytes) {
    const auto* first = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), first, first + bytes);
  };
  append(&header, sizeof header);
  append(head.data(), head.size_bytes());
  append(body.data(), body.size_bytes());
  flush();
}

void Channel::heartbeat(std::span<const AttemptId> renewed) {
  do {
    const auto part = renewed.first(std::min(renewed.size(), kMaxAttemptsPerHeartbeat));
    const std::uint64_t head[] = {part.size()};
    queue(Type::heartbeat, head, part);
    renewed = renewed.subspan(part.size());
  } while (!renewed.empty());
}

void Channel::want(AttemptId attempt) {
  const std::uint64_t head[] = {attempt};
  queue(Type::want, head, {});
}

void Channel::leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests) {
  const std::uint64_t head[] = {attempt, first};
  queue(Type::leaves, head, digests);
}

void Channel::failed(AttemptId attempt, FailReason reason) {
  const std::uint64_t head[] = {attempt, static_cast<std::uint32_t>(reason)};
  queue(Type::failed, head, {});
}

void Channel::ring_wanted(std::uint64_t slots) {
  const std::uint64_t head[] = {slots};
  queue(Type::ring_wanted, head, {});
}

void Channel::ring(const RingOffer& offer) {
  const std::uint64_t head[] = {offer.slots, offer.slot_bytes, offer.handle.size()};
  std::vector<std::uint64_t> handle((offer.handle.size() + 7) / 8);
  if (!handle.empty()) memcpy(handle.data(), offer.handle.data(), offer.handle.size());
  queue(Type::ring, head, handle);
}

void Channel::pack(const PackAsk& ask) {
  const std::uint64_t head[] = {ask.attempt, static_cast<std::uint64_t>(ask.begin),
                                static_cast<std::uint64_t>(ask.end), ask.slot, ask.digests ? 1u : 0u};
  queue(Type::pack, head, {});
}

void Channel::packed(const PackAnswer& answer) {
  const std::uint64_t head[] = {answer.attempt, static_cast<std::uint64_t>(answer.begin), answer.slot, answer.reason};
  queue(Type::packed, head, answer.digests);
}

}  // namespace kvlink
