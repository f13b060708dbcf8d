// Target side: one read, chunk by chunk. Decides what to get next, what has landed, and whether it is what the source
// digested. Posts nothing itself and knows no UCX; used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "events.hpp"
#include "exposures.hpp"
#include "plan.hpp"

namespace kvlink {

struct ReadSpec {
  std::uint64_t op = 0;
  std::string peer;
  AttemptId attempt = 0;
  std::shared_ptr<const Plan> plan;
  bool integrity = true;
  std::uint32_t chunk_leaves = 1;
  std::uint32_t max_rereads = 0;
  std::vector<const std::byte*> regions = {};     // first byte of each local region, by region number
};

class ReadJob {
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
  virtual ~ReadJob() = default;
  ReadJob(const ReadJob&) = delete;
  ReadJob& operator=(const ReadJob&) = delete;

  const ReadSpec& spec() const { return spec_; }
  std::uint32_t outstanding() const { return outstanding_; }

  // The next get, and the chunk it is for; nullptr if there is none to post now. It counts as outstanding.
  Chunk* next(Run& run);
  // A get ended, or could not be posted. After a bad end nothing more is posted, and the job waits for stop().
  void ended(Chunk& chunk, bool good);
  bool broken() const { return broken_; }
  // Whether any of its gets was ever posted.
  bool started() const { return first_posted_.has_value(); }

  // Digests from the source, in order. Throws ProtocolViolation on leaves that the plan does not have.
  void add_leaves(std::uint64_t first, std::span<const std::uint64_t> digests);
  // Hashes a slice of a landed chunk whose digests are here; false if there is none.
  bool verify();

  // No more gets; the job ends with this outcome once the outstanding ones have. The first word counts.
  void stop(Outcome outcome, std::string detail);
  bool stopped() const { return outcome_.has_value(); }
  Time stopped_at() const { return stopped_at_; }
  // Everything landed and verified, or stopped, and nothing outstanding.
  bool over() const;
  Completion completion() const;

 private:
  static constexpr std::size_t kChunksUnderWay = 16;
  static constexpr std::int64_t kLeavesPerSlice = 64;

  std::int64_t total() const { return spec_.plan->total_bytes(); }
  bool begin_chunk();
  void landed(Chunk& chunk);
  void judge(Chunk& chunk, std::int64_t first, std::span<const std::uint64_t> own);

  ReadSpec spec_;
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
  std::vector<std::uint64_t> ours_;

  bool broken_ = false;
  std::optional<Outcome> outcome_;
  Time stopped_at_{};
  std::string detail_;
  std::uint64_t bytes_moved_ = 0;
  std::uint32_t rereads_ = 0;
  std::optional<std::uint64_t> bad_leaf_;
  std::optional<Time> first_posted_;
  Time last_landed_{};
  Duration verify_time_{};
};

}  // namespace kvlink
