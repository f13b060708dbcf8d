// The native socket between two incarnations: heartbeats, renewals, leaf digests. No UCX, no Python, one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvlink {

using AttemptId = std::uint64_t;

// Why a source cannot serve an attempt (any more).
enum class FailReason : std::uint32_t { unknown = 1, lapsed = 2, withdrawn = 3, not_packed = 4 };
const char* text(FailReason reason);

// The peer sent what no correct peer sends: it is lost, with this detail.
class ProtocolViolation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Packed transfers: the target says which wire bytes are to lie in which slot of the ring that the source keeps for it.
struct PackAsk {
  AttemptId attempt = 0;
  std::int64_t begin = 0;  // whole leaves
  std::int64_t end = 0;    // whole leaves, or the plan's end
  std::uint64_t slot = 0;
  bool digests = false;
};

// The answer. Digests are there where they were wanted, one per leaf, and there is no reason.
struct PackAnswer {
  AttemptId attempt = 0;
  std::int64_t begin = 0;
  std::uint64_t slot = 0;
  std::uint32_t reason = 0;  // 0, or the FailReason for which nothing was packed
  std::span<const std::uint64_t> digests = {};
};

// A source's ring for one peer. `handle` is how it is reached, in the transport's own form.
struct RingOffer {
  std::uint64_t slots = 0;
  std::uint64_t slot_bytes = 0;
  std::span<const std::byte> handle = {};
};

// Receives frames that passed the channel's own checks. May throw ProtocolViolation.
class FrameSink {
 public:
  virtual void on_heartbeat(std::span<const AttemptId> renewed) = 0;
  virtual void on_want(AttemptId attempt) = 0;
  virtual void on_leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests) = 0;
  virtual void on_failed(AttemptId attempt, FailReason reason) = 0;
  virtual void on_ring_wanted(std::uint64_t slots) = 0;
  virtual void on_ring(const RingOffer& offer) = 0;
  virtual void on_pack(const PackAsk& ask) = 0;
  virtual void on_packed(const PackAnswer& answer) = 0;

 protected:
  ~FrameSink() = default;
};

// Frames, little-endian: u16 type, u16 zero, u32 payload bytes, payload.
//   HEARTBEAT    u64 n, n x u64 attempt                         attempts whose leases the sender renews
//   WANT         u64 attempt                                    target -> source: send me the leaves
//   LEAVES       u64 attempt, u64 first, n x u64 digest         source -> target
//   FAILED       u64 attempt, u64 reason                        source -> target: this attempt cannot be served
//   RING_WANTED  u64 slots                                      target -> source: keep a ring of so many for me
//   RING         u64 slots, u64 slot bytes, u64 n, n bytes      source -> target: here it is; n is filled up to words
//   PACK         u64 attempt, begin, end, slot, digests         target -> source, see PackAsk
//   PACKED       u64 attempt, begin, slot, reason, n x digest   source -> target, in the order of the PACKs
// An adopted descriptor is closed with the channel. After receive() or a send reported an end, only end() is of use.
class Channel {
 public:
  static constexpr std::size_t kMaxAttemptsPerHeartbeat = 1024;
  static constexpr std::size_t kMaxDigestsPerFrame = 4096;
  static constexpr std::size_t kMaxHandleBytes = 16 * 1024;
  static constexpr std::size_t kDigestRoomBytes = 256 * 1024;  // digests pause above this much unsent
  static constexpr std::size_t kMaxQueuedBytes = 1024 * 1024;  // nothing is queued above this much unsent

  // Takes the descriptor over at once, and makes it non-blocking.
  explicit Channel(int fd);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int fd() const { return fd_; }
  bool wants_write() const { return sent_ < out_.size(); }
  bool has_room_for_digests() const { return queued() < kDigestRoomBytes; }

  // Why the channel ended; empty while it lives.
  const std::string& end() const { return end_; }

  // Hands over every whole frame that is there, up to a bound; true if there may be more.
  bool receive(FrameSink& sink);
  // Sends what is queued, as far as the socket takes it.
  void flush();

  // Queues and flushes. A full queue drops heartbeats, which repeat; any other frame that finds it full ends the
  // channel.
  void heartbeat(std::span<const AttemptId> renewed);
  void want(AttemptId attempt);
  void leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests);
  void failed(AttemptId attempt, FailReason reason);
  void ring_wanted(std::uint64_t slots);
  void ring(const RingOffer& offer);
  void pack(const PackAsk& ask);
  void packed(const PackAnswer& answer);

 private:
  enum class Type : std::uint16_t { heartbeat = 1, want, leaves, failed, ring_wanted, ring, pack, packed };

  std::size_t queued() const { return out_.size() - sent_; }
  void queue(Type type, std::span<const std::uint64_t> head, std::span<const std::uint64_t> body);
  std::size_t dispatch(std::span<const std::byte> bytes, FrameSink& sink);
  void deliver(Type type, std::span<const std::uint64_t> words, FrameSink& sink);
  void deliver_packing(Type type, std::span<const std::uint64_t> words, FrameSink& sink);

  int fd_;
  std::string end_;
  std::vector<std::byte> in_;
  std::size_t held_ = 0;  // bytes of in_ that are filled
  std::vector<std::byte> out_;
  std::size_t sent_ = 0;
  std::vector<std::uint64_t> words_;  // the frame being delivered, aligned
};

}  // namespace kvlink
