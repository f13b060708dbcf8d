// A copy plan and its walker. See docs/architecture.md, "Plan": the walk of a plan is the wire order, and wire offset 0
// is its first byte. Nothing here knows addresses; regions are numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "element.hpp"

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

// How a segment's elements change type. The scale of an element is at row `base`, column as `scale_dim` of the nest
// walks them. See kernels/numbers.hpp for what is computed.
struct Conversion {
  Element source;
  Element target;
  std::vector<float> source_scales = {};   // [bases, columns], or empty for 1
  std::vector<float> target_factors = {};  // the same: the inverse of the target's scales, in float32
  std::int64_t columns = 1;
  int scale_dim = -1;                      // into the nest; -1 where there is one column

  std::int64_t source_bytes() const { return facts_of(source).bytes; }
  std::int64_t target_bytes() const { return facts_of(target).bytes; }
};

// bases x pieces x nest x run_bytes, walked outermost first. Where it converts, everything of the target counts the
// target's bytes, and run_bytes the source's, which are the wire's.
struct Segment {
  std::vector<Base> bases;
  std::vector<Piece> pieces;
  std::vector<Dim> nest;
  std::int64_t run_bytes = 0;
  std::optional<Conversion> convert = std::nullopt;
};

// Bytes contiguous on the walked side or sides.
struct Run {
  std::int64_t source_region;
  std::int64_t source_offset;
  std::int64_t target_region;
  std::int64_t target_offset;
  std::int64_t bytes;
};

// Runs of equal length at equal distances, `bytes` of the source each. What to do with them is the part's to say.
struct Rows {
  std::int64_t source_region;
  std::int64_t source_offset;
  std::int64_t target_region;
  std::int64_t target_offset;
  std::int64_t bytes;
  std::int64_t count;
  std::int64_t source_stride;  // of rows; means nothing for one
  std::int64_t target_stride;
  std::size_t part;
  std::size_t scale;           // index of the first row's scale
  std::size_t scale_step;      // from row to row
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
  // Equal only for copies of one plan, for the life of the process: what is derived from a plan is kept under it.
  std::uint64_t id() const { return id_; }

  // Throws std::invalid_argument, naming the region, unless every byte of `side` lies inside its region.
  void check_bounds(Side side, std::span<const std::int64_t> region_lengths) const;

  // Maximal runs of the whole plan, walked.
  std::int64_t count_runs() const;

  // Whether any byte changes on its way: such a plan's target does not hold its wire bytes.
  bool converts() const;

  // Whether no border of a leaf cuts an element that is converted, so that a stretch of whole leaves can be converted
  // without its neighbours' bytes. The planner orders segments so that this holds.
  bool cuts_no_element() const;

  // A segment's nest with all that is contiguous on the walked sides folded away. Steps of a scale are never folded.
  struct Nest {
    std::size_t depth = 0;
    std::array<Dim, kMaxNestDims> dims{};
    std::int64_t run_bytes = 0;
    std::int64_t total_bytes = 0;
    int scale_dim = -1;
  };
  // A segment, ready to be walked.
  struct Part {
    std::vector<Base> bases;
    std::vector<Piece> pieces;
    std::array<Nest, 3> nests;  // by Walk
    std::optional<Conversion> convert;

    const Nest& nest(Walk walk) const { return nests[static_cast<std::size_t>(walk)]; }
    // How many bytes of the target `bytes` of the source become.
    std::int64_t at_target(std::int64_t bytes) const {
      return convert ? bytes / convert->source_bytes() * convert->target_bytes() : bytes;
    }
  };
  std::span<const Part> parts() const { return parts_; }
  // Wire offset of a part's first byte; that of one past the last part is the total.
  std::int64_t part_begin(std::size_t part) const { return starts_[part]; }

 private:
  friend class Cursor;

  struct Reach {
    std::int64_t region;
    std::int64_t end;
  };

  static Nest fold(const Segment& segment, Walk walk);
  void add_reach(const Segment& segment, Side side);

  std::uint64_t id_;
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

  // The next maximal run in wire order, neighbours that touch merged (never of a part that converts); false at the end.
  bool next(Run& run);

  // The next runs in wire order as rows, all of an innermost dimension where they are whole; false at the end. Rows are
  // single where that dimension has nothing to give, and then as long as `next` would make them.
  bool next_rows(Rows& rows);

 private:
  void enter_part();
  void enter_piece();
  void advance();
  bool step();
  std::int64_t whole_rows() const;
  // Where a run begins.
  struct Start {
    std::int64_t source_region;
    std::int64_t source_offset;
    std::int64_t target_region;
    std::int64_t target_offset;
  };
  Start start() const;
  std::int64_t take(const Start& start);
  bool continues(const Start& start, std::int64_t bytes) const;

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
