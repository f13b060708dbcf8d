// A copy plan and its walker. See docs/architecture.md, "Plan": the walk of a plan is the wire order, and wire offset 0
// is its first byte. Nothing here knows addresses; regions are numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace kvlink {

// Mirrors of kvlink/limits.py (a test compares them). With all terms below 2^46, no sum in this file can overflow.
inline constexpr std::int64_t kMaxOffsetBytes = std::int64_t{1} << 46;
inline constexpr std::int64_t kMaxTransferBytes = std::int64_t{1} << 44;
inline constexpr std::int64_t kMaxRegions = 4096;
inline constexpr std::size_t kMaxNestDims = 8;

enum class Side : int { source = 0, target = 1 };

const char* side_name(Side side);

// Bytes at `offset` of a region. Offsets of a piece or of a stride are relative and use no region.
struct Base {
  std::int64_t source_region;
  std::int64_t source_offset;
  std::int64_t target_region;
  std::int64_t target_offset;
};

struct Piece {
  std::int64_t source_offset;
  std::int64_t target_offset;
};

struct Dim {
  std::int64_t count;
  std::int64_t source_stride;
  std::int64_t target_stride;
};

// bases x pieces x nest x run_bytes, walked outermost first.
struct Segment {
  std::vector<Base> bases;
  std::vector<Piece> pieces;
  std::vector<Dim> nest;
  std::int64_t run_bytes = 0;
};

// Bytes contiguous on the walked side or sides.
struct Run {
  std::int64_t source_region;
  std::int64_t source_offset;
  std::int64_t target_region;
  std::int64_t target_offset;
  std::int64_t bytes;
};

// Which sides must be contiguous within a run. One-sided runs are longer; their other side's fields mean nothing.
enum class Walk : int { source = 0, target = 1, both = 2 };

constexpr Walk walk_of(Side side) { return side == Side::source ? Walk::source : Walk::target; }

// Immutable once built, so any number of threads may walk it.
class Plan {
 public:
  // Throws std::invalid_argument, naming the segment, if a count or size is not positive, a bound above is passed, or
  // an offset is negative.
  explicit Plan(std::vector<Segment> segments);

  std::int64_t total_bytes() const { return starts_.back(); }

  // Throws std::invalid_argument, naming the region, unless every byte of `side` lies inside its region.
  void check_bounds(Side side, std::span<const std::int64_t> region_lengths) const;

  // Maximal runs of the whole plan, walked.
  std::int64_t count_runs() const;

 private:
  friend class Cursor;

  // A segment's nest with all that is contiguous on the walked sides folded away.
  struct Nest {
    std::size_t depth = 0;
    std::array<Dim, kMaxNestDims> dims{};
    std::int64_t run_bytes = 0;
    std::int64_t total_bytes = 0;
  };
  struct Part {
    std::vector<Base> bases;
    std::vector<Piece> pieces;
    std::array<Nest, 3> nests;  // by Walk
  };
  struct Reach {
    std::int64_t region;
    std::int64_t end;
  };

  static Nest fold(const Segment& segment, Walk walk);
  void add_reach(const Segment& segment, Side side);

  std::vector<Part> parts_;
  std::vector<std::int64_t> starts_;               // wire offset of each part, then the total
  std::array<std::vector<Reach>, 2> reach_;        // by Side: the furthest byte in each region, by region
};

// Walks wire bytes [begin, end) of a plan, which must outlive it. Cheap to make and to copy; no allocation.
class Cursor {
 public:
  // Runs are cut at `begin`, `end` and after `max_run_bytes`. Throws std::invalid_argument on a range outside the plan.
  Cursor(const Plan& plan, std::int64_t begin, std::int64_t end, Walk walk = Walk::both,
         std::int64_t max_run_bytes = std::numeric_limits<std::int64_t>::max());

  // The next maximal run in wire order, neighbours that touch merged; false at the end.
  bool next(Run& run);

 private:
  void enter_part();
  void enter_piece();
  void advance();
  bool step();
  bool continues(const Run& run) const;

  // The position is kept as single numbers, never as a Run: a Run would be written by halves and copied by vector
  // loads, which cannot be forwarded from pending stores and so wait for every cache miss before them (measured: half
  // the speed of a digest over 256-byte runs).
  const Plan* plan_;
  Walk walk_;
  std::size_t part_ = 0;
  std::size_t base_ = 0;
  std::size_t piece_ = 0;
  const Plan::Nest* nest_ = nullptr;
  std::array<std::int64_t, kMaxNestDims> digits_{};  // of the nest, outermost first
  std::int64_t source_region_ = 0;
  std::int64_t target_region_ = 0;
  std::int64_t source_offset_ = 0;  // of the nest's run at the position
  std::int64_t target_offset_ = 0;
  std::int64_t skip_ = 0;           // bytes of that run that are behind: before `begin`, or given out
  std::int64_t stretch_ = 0;        // bytes of that run still to give out; 0 at the end of the walk
  std::int64_t remaining_ = 0;      // bytes of the walk after that run
  std::int64_t max_run_bytes_;
};

}  // namespace kvlink
