// Target side where the source is asked for bytes, stretch by stretch (stream, packed paths): one read, which all lanes
// to a peer bring in together, and what is still to be asked for.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "digest.hpp"
#include "read.hpp"

namespace kvlink {

// Long enough that a system call's cost does not matter, short enough that it is hashed and copied while in the cache,
// and that other reads need not wait long.
inline constexpr std::int64_t kMaxAskBytes = 512 * 1024;
inline constexpr std::size_t kMaxAskLeaves = kMaxAskBytes / kLeafBytes;
// Asks unanswered on one lane. With the size above: what fills a pipe of 100 Gbit/s and half a millisecond.
inline constexpr std::size_t kMaxAsks = 16;

// Wire bytes [begin, end): whole chunks.
struct Stretch {
  std::int64_t begin;
  std::int64_t end;
};

// Shared by the engine's thread and all lanes' movers. A chunk of more than an ask may be is moved as several.
class AskedRead : public ActiveRead {
 public:
  // `keep` is what must outlive the read; `lanes` is how many share it. No ask is for more than `max_ask_bytes`.
  AskedRead(ReadSpec spec, std::shared_ptr<const void> keep, std::size_t lanes,
            std::int64_t max_ask_bytes = kMaxAskBytes);

  // The next stretch to ask for: chunks to read again first.
  std::optional<Stretch> take();
  // As many whole chunks at a time, from now on, as fit into so many bytes and under a cap.
  void take_up_to(std::int64_t bytes);
  // How many take() would still give.
  std::size_t left() const;

  // Bytes may land, and be looked at, only between an enter() that was true and its exit(): once stopped and left by
  // all, none can. exit() is true if with it the read is over.
  bool enter();
  bool exit();
  // Within: a whole stretch is in memory. Empty digests: nobody asked for them. True if there is more to take() again.
  bool landed(Stretch stretch, std::span<const std::uint64_t> theirs, std::span<const std::uint64_t> ours,
              Duration hashing);

  void stop(Outcome outcome, std::string detail) override;
  bool stopped() const override;
  bool over() const override;
  Completion completion() const override;

 private:
  bool is_over() const { return inside_ == 0 && (outcome_.has_value() || finished_ == total()); }

  const std::shared_ptr<const void> keep_;
  const std::int64_t chunk_bytes_;
  std::int64_t ask_bytes_;

  mutable std::mutex mutex_;
  std::int64_t taken_ = 0;
  std::int64_t finished_ = 0;  // wire bytes landed and, with integrity, verified
  std::uint32_t inside_ = 0;
  std::deque<Stretch> again_;
  std::unordered_map<std::int64_t, std::uint32_t> rereads_;  // by where the chunk begins; only of those that differed
};

// Reads from one peer that have something to ask for; lanes take from it in turn, so reads advance together.
class Demand {
 public:
  explicit Demand(std::size_t lanes) : lanes_(lanes) {}

  struct Ask {
    std::shared_ptr<AskedRead> read;
    Stretch stretch;
  };

  void add(std::shared_ptr<AskedRead> read);
  bool any();
  // The next ask for a lane that waits for `unanswered` ones already. None: no more, or the rest is for other lanes.
  std::optional<Ask> take(std::size_t unanswered);

 private:
  const std::size_t lanes_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<AskedRead>> reads_;
};

}  // namespace kvlink
