// Carries a plan's bytes from one side to the other on the calling thread: between regions, or between regions and
// memory where they lie packed in wire order; copied, converted, and digested on their way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "digest.hpp"
#include "plan.hpp"
#include "row_kernel.hpp"

namespace kvlink {

struct MoveVariant {
  const char* name;
  const RowKernel* rows;
};

// What this CPU can run, fastest first; never empty. All write the same bytes.
std::span<const MoveVariant> move_variants();

// Where one side's bytes are: in regions (`regions[r]` is where region r begins), or packed, from wire byte `begin` on.
template <typename Byte>
struct Place {
  std::span<Byte* const> regions = {};
  Byte* packed = nullptr;
  std::int64_t begin = 0;

  Byte* find(std::int64_t region, std::int64_t offset, std::int64_t at) const {
    return packed != nullptr ? packed + (at - begin) : regions[static_cast<std::size_t>(region)] + offset;
  }
  std::int64_t stride(std::int64_t in_regions, std::int64_t row_bytes) const {
    return packed != nullptr ? row_bytes : in_regions;
  }
};

// How a target is written.
enum class Stores {
  plain,     // this core looks at it soon
  streamed,  // past the caches: it does not
  strings,   // another core looked at it last, and will: the machine's string instruction takes such lines over without
             // fetching them first (ring of two processes, 64 KiB runs: 18 GB/s; streamed 13, plain 7)
};
// Shorter rows than this are not for strings.
inline constexpr std::int64_t kStringRowBytes = 8192;

struct CarryOptions {
  Stores stores = Stores::plain;
  const MoveVariant& variant = move_variants().front();
};

// Carries wire bytes [begin, end). The caller has checked the plan's bounds, that no run overlaps its own target, and
// that not both sides are packed. What goes from regions to a packed place is the wire's, converted or not; what comes
// from one must cut no element that is converted (Plan::cuts_no_element).
// Throws std::invalid_argument on a range outside the plan, before a byte is moved.
void carry(const Plan& plan, const Place<const std::byte>& from, const Place<std::byte>& to, std::int64_t begin,
           std::int64_t end, const CarryOptions& options = {});

// The same for leaves, the last of which may be the plan's: writes the digests of the bytes that were carried, whoever
// writes the source meanwhile (but not the target, of strings). Requires Plan::cuts_no_element.
void carry_and_digest(const Plan& plan, const Place<const std::byte>& from, const Place<std::byte>& to,
                      std::int64_t begin, std::int64_t end, std::span<std::uint64_t> leaves,
                      const CarryOptions& options = {});

// Whether all runs of a side are of so many bytes.
bool has_runs_of(const Plan& plan, Side side, std::int64_t bytes);

}  // namespace kvlink
