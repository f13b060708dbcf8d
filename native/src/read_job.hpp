// Target side: one read, chunk by chunk. Decides what to get next, what has landed, and whether it is what the source
// digested. Posts nothing itself and knows no UCX; used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "plan.hpp"
#include "read.hpp"

namespace kvlink {

class ReadJob : public ActiveRead {
 public:
  // A chunk under way. Its address is what a get carries, and is stable for the job's life.
  struct Chunk {
    ReadJob* job = nullptr;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::uint32_t outstanding = 0;
    std::uint32_t rereads = 0;
    bool posted = false;           // nothing left to post
    std::int64_t verified = 0;     // leaves of this chunk that are
    bool differed = false;
  };

  explicit ReadJob(ReadSpec spec);

  std::uint32_t outstanding() const { return outstanding_; }

  // Whether next() may have something to post.
  bool more() const {
    return !stopped() && !broken_ && (posting_ != nullptr || !again_.empty() || (started_ < total() && !free_.empty()));
  }
  // The next get, and the chunk it is for; nullptr if there is none to post now. It counts as outstanding.
  Chunk* next(Run& run);
  // A get ended, or could not be posted. After a bad end nothing more is posted, and the job waits for stop().
  void ended(Chunk& chunk, bool good);
  bool broken() const { return broken_; }
  // Whether any of its gets was ever posted.
  bool started() const { return first_asked_.has_value(); }

  // Digests from the source, in order. Throws ProtocolViolation on leaves that the plan does not have.
  void add_leaves(std::uint64_t first, std::span<const std::uint64_t> digests);
  // Hashes a slice of a landed chunk whose digests are here; false if there is none.
  bool verify();

  bool over() const override;

 private:
  static constexpr std::size_t kChunksUnderWay = 16;
  static constexpr std::int64_t kLeavesPerSlice = 64;

  bool begin_chunk();
  void landed(Chunk& chunk);
  void judge(Chunk& chunk, std::int64_t first, std::span<const std::uint64_t> own);

  std::int64_t chunk_bytes_;
  std::int64_t started_ = 0;             // wire bytes handed to chunks
  std::int64_t finished_ = 0;            // wire bytes landed and, with integrity, verified
  std::uint32_t outstanding_ = 0;

  std::vector<Chunk> chunks_;
  std::vector<Chunk*> free_;
  std::deque<Chunk*> again_;             // to be read again
  std::deque<Chunk*> landed_;            // to be verified
  Chunk* posting_ = nullptr;
  std::optional<Cursor> cursor_;

  std::vector<std::uint64_t> theirs_;    // leaf digests received so far

  bool broken_ = false;
};

}  // namespace kvlink
