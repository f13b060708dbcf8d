// What two ends on one host tell each other beside their channel: frames on a Unix socket, the *lane*, which carries
// file descriptors and wakes whoever sleeps; and words in memory that each end writes and the other only reads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "channel.hpp"
#include "digest.hpp"

namespace kvlink {

// --- the lane -------------------------------------------------------------------------------------------------------

enum class Tell : std::uint32_t {
  bell = 1,   // look at the words: something was published while you slept
  map,        // target -> source: give me this region to map
  region,     // source -> target: here it is, with its file; without a file it cannot be mapped
  want_ring,  // target -> source: my asks will be in this page (a file); give me your ring
  ring,       // source -> target: my answers will be in this page, the bytes in this ring (two files)
  want_proof, // target -> source: by what shall I know your memory?
  proof,      // source -> target: at this address of mine lies this number
  find,       // target -> source: where does this region lie in your memory?
  found,      // source -> target: there; nowhere, if it has no bytes
};

struct Telling {
  Tell tell{};
  std::uint32_t region = 0;
  std::uint64_t offset = 0;  // where the region begins in its file; an address in the source's process
  std::uint64_t bytes = 0;   // of the region; the number that lies at the address
  std::uint64_t zero = 0;
};
static_assert(sizeof(Telling) == 32);

// --- the ring -------------------------------------------------------------------------------------------------------

// Small enough to stay in a core's cache between the two passes over it, large enough that a word's way between two
// cores does not matter.
inline constexpr std::int64_t kRingSlotBytes = 256 * 1024;
inline constexpr std::size_t kRingSlotLeaves = kRingSlotBytes / kLeafBytes;
inline constexpr std::uint32_t kRingSlots = 8;
inline constexpr std::size_t kRingBytes = kRingSlots * kRingSlotBytes;

// Counts only ever rise, and wrap. Slot and entry of the n-th ask, and of its answer, are n % kRingSlots: an entry is
// written again only once its slot is free, which the target alone decides.
struct Words {
  alignas(64) std::atomic<std::uint32_t> published{0};
  std::atomic<std::uint32_t> cpu{0};                // where the publisher ran
  alignas(64) std::atomic<std::uint32_t> asleep{0};  // 1: ring the bell after publishing
};

// What of a stretch is asked for: where the target has mapped the bytes themselves, only what they should be.
enum class Want : std::uint32_t { bytes = 1, digests = 2, both = 3 };

constexpr bool wants(Want want, Want part) {
  return (static_cast<std::uint32_t>(want) & static_cast<std::uint32_t>(part)) != 0;
}

struct AskEntry {
  alignas(64) std::atomic<AttemptId> attempt{0};
  std::atomic<std::int64_t> begin{0};    // whole leaves
  std::atomic<std::int64_t> end{0};      // whole leaves, or the plan's end; a slot's worth at most
  std::atomic<std::uint32_t> want{0};    // a Want
};

struct AnswerEntry {
  alignas(64) std::atomic<std::uint32_t> reason{0};  // 0, or a FailReason: the slot holds nothing
  std::array<std::atomic<std::uint64_t>, kRingSlotLeaves> digests{};
};

struct AskPage {
  Words words;
  std::array<AskEntry, kRingSlots> asks;
};

struct AnswerPage {
  Words words;
  std::array<AnswerEntry, kRingSlots> answers;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "words are shared between processes");

}  // namespace kvlink
