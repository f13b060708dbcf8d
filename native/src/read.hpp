// Target side: what every read is, however its bytes come. What was asked for, how it ended, what it moved.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
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
  std::vector<std::byte*> regions = {};  // first byte of each local region, by region number
  bool packed = false;                   // whether the source is to pack the bytes, where a transport can do both
  std::int64_t max_ask_bytes = std::numeric_limits<std::int64_t>::max();  // at a time: under a bandwidth cap
};

// A transport's own reads derive from it; where several threads move one read's bytes, they override the calls with
// locked ones.
class ActiveRead {
 public:
  explicit ActiveRead(ReadSpec spec);
  virtual ~ActiveRead() = default;
  ActiveRead(const ActiveRead&) = delete;
  ActiveRead& operator=(const ActiveRead&) = delete;

  const ReadSpec& spec() const { return spec_; }

  // Nothing more is asked for; the read ends with this outcome once no byte of it is under way. The first word counts.
  virtual void stop(Outcome outcome, std::string detail);
  virtual bool stopped() const { return outcome_.has_value(); }
  Time stopped_at() const { return stopped_at_; }
  // Everything landed and verified, or stopped, and no byte can land any more.
  virtual bool over() const = 0;
  virtual Completion completion() const;

  std::vector<std::uint64_t> cut_offs;  // ops waiting for this read's end; the engine's thread's

 protected:
  std::int64_t total() const { return spec_.plan->total_bytes(); }
  // Wire bytes have landed, whether or not they are good.
  void count_landed(std::int64_t bytes);
  // A leaf differed, on a chunk that had been read again `rereads` times: whether to read it once more. If not, stops.
  bool may_read_again(std::uint64_t leaf, std::uint32_t rereads);

  const ReadSpec spec_;
  std::vector<std::uint64_t> ours_;      // leaf digests of what landed, with integrity
  std::optional<Outcome> outcome_;
  std::optional<Time> first_asked_;
  Duration verify_time_{};

 private:
  Time stopped_at_{};
  std::string detail_;
  std::uint64_t bytes_moved_ = 0;
  std::uint32_t rereads_ = 0;
  std::optional<std::uint64_t> bad_leaf_;
  Time last_landed_{};
};

}  // namespace kvlink
