// What two ends on one host ask of each other, slot by slot. Where the source's memory cannot be mapped, it gathers
// into the slots of a ring, and the target scatters from them; where it is mapped, the target copies it itself, and the
// source answers with digests alone. The target decides what goes into which slot, and when a slot is free.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "exposures.hpp"
#include "packer.hpp"
#include "shared_memory.hpp"
#include "shared_read.hpp"
#include "shared_wire.hpp"

namespace kvlink {

// Words that one end publishes and the other waits for. Ours are written here alone, the peer's there alone: whatever a
// peer writes is judged by whoever reads it.
class WordPair {
 public:
  explicit WordPair(Words& ours) : ours_(ours) {}
  void meet(const Words& theirs) { theirs_ = &theirs; }
  bool met() const { return theirs_ != nullptr; }

  // True if the peer sleeps, and must be woken.
  bool publish(std::uint32_t count);
  std::uint32_t published_by_peer() const;
  // Whether the peer last published from the CPU that this thread runs on: spinning would keep it from running.
  bool peer_is_on_this_cpu() const;
  bool peer_is_asleep() const;
  void doze() { ours_.asleep.store(1, std::memory_order_seq_cst); }
  void wake() { ours_.asleep.store(0, std::memory_order_relaxed); }

 private:
  Words& ours_;
  const Words* theirs_ = nullptr;
};

// What one step of an end came to.
struct RingStep {
  bool ran = false;   // there may be more to do at once
  bool wake = false;  // the peer sleeps, and is to be woken
  // Target: a slot has been brought to its end.
  std::shared_ptr<SharedRead> read = nullptr;
  bool again = false;  // and its read has something to ask for once more
};

// The target's end.
class RingAsking {
 public:
  explicit RingAsking(Packer& packer);
  ~RingAsking();
  RingAsking(const RingAsking&) = delete;
  RingAsking& operator=(const RingAsking&) = delete;

  int page_fd() const { return page_.fd(); }
  // The peer's answers and slots. Throws as PeerMemory does.
  void meet(const Descriptor& answers, const Descriptor& ring);
  bool met() const { return words_.met(); }

  bool has_room(const SharedRead& read) const { return asked_ - landed_ < read.max_asks(); }
  bool waiting() const { return asked_ != landed_; }
  void ask(std::shared_ptr<SharedRead> read, Stretch stretch);
  // What was asked, at once. True if the peer must be woken.
  bool publish() { return words_.publish(asked_); }

  bool answered() const { return words_.met() && words_.published_by_peer() != landed_; }
  // Brings in some of the next slot that is answered. Throws ProtocolViolation on answers to nothing.
  RingStep step();

  WordPair& words() { return words_; }
  const WordPair& words() const { return words_; }

 private:
  struct Slot {
    std::shared_ptr<SharedRead> read;
    Stretch stretch;
  };
  // The slot whose bytes are being brought in; its read was entered.
  struct Landing {
    std::array<std::uint64_t, kRingSlotLeaves> theirs;
    std::array<std::uint64_t, kRingSlotLeaves> ours;
    std::size_t leaves;
    std::unique_ptr<PackJob> job;  // none: its bytes are in place
    Duration took{};
  };

  bool begin(const Slot& slot, std::size_t index);
  bool bring_in(const Slot& slot, std::size_t index);
  RingStep finish();

  Packer& packer_;
  SharedMemory page_;
  std::unique_ptr<const PeerMemory> answers_;
  std::unique_ptr<const PeerMemory> ring_;
  WordPair words_;
  std::array<Slot, kRingSlots> slots_{};
  std::optional<Landing> landing_;
  std::uint32_t asked_ = 0;
  std::uint32_t landed_ = 0;
};

// The source's end.
class RingServing {
 public:
  // Throws as PeerMemory and SharedMemory do.
  RingServing(Exposures& exposures, Packer& packer, std::string peer, const Descriptor& asks);

  int page_fd() const { return page_.fd(); }
  int ring_fd() const { return ring_.fd(); }

  bool asked() const { return words_.published_by_peer() != served_; }
  // Does some of what the next ask wants: what is exposed to the peer, inside that plan, and under its lease. Throws
  // ProtocolViolation on what cannot be an ask, and on an ask for what the plan does not have.
  RingStep step();

  WordPair& words() { return words_; }
  const WordPair& words() const { return words_; }

 private:
  // An ask's words, each read once: the peer may write them at any time. In the order of destruction, from the last.
  struct Work {
    AttemptId attempt;
    std::int64_t begin;
    std::int64_t end;
    Want want;
    std::array<std::uint64_t, kRingSlotLeaves> digests{};
    std::shared_ptr<Exposure> exposure = nullptr;
    Exposures::Look look = {};
    std::unique_ptr<PackJob> job = nullptr;

    std::span<std::uint64_t> leaves() {
      const auto count = static_cast<std::size_t>(leaf_count(end - begin));
      return std::span(digests).first(wants(want, Want::digests) ? count : 0);
    }
  };

  std::size_t slot() const { return served_ % kRingSlots; }
  void begin();
  std::optional<FailReason> open(Work& work);
  RingStep answer(std::uint32_t reason);

  Exposures& exposures_;
  Packer& packer_;
  const std::string peer_;
  PeerMemory asks_;
  SharedMemory page_;
  SharedMemory ring_;
  WordPair words_;
  std::optional<Work> work_;
  std::uint32_t served_ = 0;
};

}  // namespace kvlink
