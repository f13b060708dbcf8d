// What travels on a lane: a stream socket between two authenticated incarnations, beside their channel. Little-endian,
// the same in both directions.
//
//   ASK    header                                      target -> source: send me wire bytes [begin, end) of an attempt
//   FRAME  header, payload, digests, trailer           source -> target: the answer, in the order of the asks
//   FRAME  header with a reason                        source -> target: the attempt cannot be served
//
// The payload is [begin, end) in plan order. Digests are there where the ask wanted them, one per leaf of [begin, end),
// and behind the payload, so that a source can digest it piece by piece as it sends.
// The trailer is 0, or the FailReason for which the source had to stop reading its memory in mid-frame: then the rest
// of the payload was filled up, and none of it counts.
#pragma once

#include <limits.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#include "asked_read.hpp"
#include "channel.hpp"
#include "digest.hpp"

namespace kvlink {

static_assert(std::endian::native == std::endian::little, "headers are sent as they lie");

enum class LaneWord : std::uint16_t { ask = 1, frame = 2 };

struct LaneHeader {
  LaneWord word{};
  std::uint16_t digests = 0;  // 0 or 1
  std::uint32_t reason = 0;   // of a frame: 0, or a FailReason
  AttemptId attempt = 0;
  std::int64_t begin = 0;     // whole leaves
  std::int64_t end = 0;       // whole leaves, or the plan's end

  // Whether an ask may be one, whatever the attempt.
  bool is_ask() const {
    return word == LaneWord::ask && digests <= 1 && reason == 0 && begin >= 0 && begin % kLeafBytes == 0 &&
           begin < end && end <= kMaxTransferBytes && end - begin <= kMaxAskBytes;
  }
};
static_assert(sizeof(LaneHeader) == 32);

using LaneTrailer = std::uint64_t;

// What is looked at (digested, gathered, scattered) on its way through a socket is so piece by piece: it stays in a
// core's cache between the kernel's copy and ours. Whole leaves.
inline constexpr std::int64_t kPieceBytes = 256 * 1024;
static_assert(kPieceBytes % kLeafBytes == 0 && kMaxAskBytes % kPieceBytes == 0);

// Shorter runs than this are too many for one call's iovecs: they always go by way of a packed piece.
inline constexpr std::int64_t kShortRunBytes = 1024;
static_assert(kMaxAskBytes / kShortRunBytes + 8 < IOV_MAX);

// What is still to pass of a frame, in its order. A sender counts its own asks, which go first, and the header.
struct FrameLeft {
  std::size_t asks = 0;
  std::size_t header = 0;
  std::size_t payload = 0;
  std::size_t digests = 0;
  std::size_t trailer = 0;

  std::size_t total() const { return asks + header + digests + payload + trailer; }
  // Counts off `bytes`; returns those beyond the frame.
  std::size_t pass(std::size_t bytes) {
    for (std::size_t* part : {&asks, &header, &payload, &digests, &trailer}) {
      const std::size_t taken = bytes < *part ? bytes : *part;
      *part -= taken;
      bytes -= taken;
    }
    return bytes;
  }
  // What follows a header.
  void add_body(const LaneHeader& of) {
    payload = static_cast<std::size_t>(of.end - of.begin);
    digests = of.digests ? sizeof(std::uint64_t) * static_cast<std::size_t>(leaf_count(of.end - of.begin)) : 0;
    trailer = sizeof(LaneTrailer);
  }
};

}  // namespace kvlink
