#include "move.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cfenv>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "isa.hpp"

namespace kvlink {
namespace {

// Hashing follows moving in steps that stay in a core's cache between the two.
constexpr std::int64_t kFusedLeaves = 4;
static_assert(kSliceBytes % (kFusedLeaves * kLeafBytes) == 0, "a slice is whole steps");

// Conversions round as IEEE's default does, whatever the calling thread was set to (torch.set_flush_denormal).
class DefaultRounding {
 public:
  DefaultRounding() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultRounding() { std::fesetenv(&before_); }
  DefaultRounding(const DefaultRounding&) = delete;
  DefaultRounding& operator=(const DefaultRounding&) = delete;

 private:
  std::fenv_t before_;
};

// Where one side's bytes are: in regions, or packed in wire order from `begin` on.
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

class Mover {
 public:
  Mover(const Plan& plan, Place<const std::byte> from, Place<std::byte> to, bool stream, const RowKernel& rows)
      : plan_(plan), from_(from), to_(to), rows_(rows), copy_(stream ? rows.stream : rows.copy),
        walk_(to.packed != nullptr     ? Walk::source
              : from.packed != nullptr ? Walk::target
                                       : Walk::both) {}

  void run(std::int64_t begin, std::int64_t end) const {
    Cursor cursor(plan_, begin, end, walk_);
    Rows rows;
    for (std::int64_t at = begin; cursor.next_rows(rows); at += rows.count * rows.bytes) {
      const auto* source =
          reinterpret_cast<const char*>(from_.find(rows.source_region, rows.source_offset, at));
      auto* target = reinterpret_cast<char*>(to_.find(rows.target_region, rows.target_offset, at));
      rows.source_stride = from_.stride(rows.source_stride, rows.bytes);
      rows.target_stride = to_.stride(rows.target_stride, rows.bytes);
      const auto& convert = plan_.parts()[rows.part].convert;
      if (convert && walk_ != Walk::source) {
        convert_rows(*convert, rows, at - plan_.part_begin(rows.part), target, source);
      } else {
        const std::int64_t ahead = walk_ == Walk::target ? 0 : rows.ahead;  // what is packed is in the cache
        copy_(target, source, rows.count, {rows.source_stride, rows.target_stride}, rows.bytes, ahead);
      }
    }
    rows_.fence();
  }

 private:
  // `at`: where in its segment the first row begins. Rows that are several are whole; a single one may be cut inside
  // an element at either end, and its target offset is then that of the cut element.
  void convert_rows(const Conversion& convert, const Rows& rows, std::int64_t at, char* target,
                    const char* source) const {
    const std::int64_t size = convert.source_bytes();
    const std::int64_t lead = -at & (size - 1);
    const std::int64_t elements = (((at + rows.bytes + size - 1) & -size) - at - lead) / size;
    const auto scales = [&rows](const std::vector<float>& table) {
      return table.empty() ? nullptr : table.data() + rows.scale;
    };
    rows_.convert[static_cast<int>(convert.source)][static_cast<int>(convert.target)](
        target + (lead != 0 ? convert.target_bytes() : 0), source + lead, rows.count,
        {rows.source_stride, rows.target_stride}, elements, scales(convert.source_scales),
        scales(convert.target_factors), static_cast<std::int64_t>(rows.scale_step));
  }

  const Plan& plan_;
  const Place<const std::byte> from_;
  const Place<std::byte> to_;
  const RowKernel& rows_;
  const CopyRows copy_;
  const Walk walk_;
};

// Calls work(slice) for every slice, each on one of up to `threads` threads. Slices are taken in order, so that all
// threads walk the same stretch of the source.
template <class Work>
void for_slices(std::int64_t slices, int threads, bool converts, const Work& work) {
  std::atomic<std::int64_t> next{0};
  const auto worker = [&] {
    std::optional<DefaultRounding> rounding;
    if (converts) rounding.emplace();
    for (std::int64_t slice = next++; slice < slices; slice = next++) work(slice);
  };
  std::vector<std::jthread> others;
  for (std::int64_t i = 1; i < std::min<std::int64_t>(threads, slices); ++i) {
    try {
      others.emplace_back(worker);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: fewer do the same
    }
  }
  worker();
}

}  // namespace

std::span<const MoveVariant> move_variants() {
  static const std::array all{
#if defined(__x86_64__)
      MoveVariant{"avx512", &row_kernel_avx512()},
      MoveVariant{"avx2", &row_kernel_avx2()},
#endif
      MoveVariant{"baseline", &row_kernel_baseline()},
  };
  static const std::size_t skip = isas_beyond_this_cpu();
  return std::span(all).subspan(skip);
}

void move_range(const Plan& plan, std::span<const std::byte* const> source_regions,
                std::span<std::byte* const> target_regions, std::int64_t begin, std::int64_t end,
                const MoveOptions& options) {
  static_cast<void>(Cursor(plan, begin, end));  // refuses a range outside the plan
  const Mover mover(plan, {.regions = source_regions}, {.regions = target_regions},
                    options.past_caches || end - begin >= kStreamFromBytes, *options.variant.rows);
  const std::int64_t slices = (end - begin + kSliceBytes - 1) / kSliceBytes;
  for_slices(slices, options.threads, plan.converts(), [&](std::int64_t slice) {
    const std::int64_t from = begin + slice * kSliceBytes;
    mover.run(from, std::min(end, from + kSliceBytes));
  });
}

void move_and_digest(const Plan& plan, std::span<const std::byte* const> source_regions,
                     std::span<std::byte* const> target_regions, std::int64_t first, std::span<std::uint64_t> leaves,
                     const MoveOptions& options) {
  const auto count = static_cast<std::int64_t>(leaves.size());
  check_leaves(plan, first, count);
  const Mover mover(plan, {.regions = source_regions}, {.regions = target_regions},
                    options.past_caches || count * kLeafBytes >= kStreamFromBytes, *options.variant.rows);
  constexpr std::int64_t leaves_per_slice = kSliceBytes / kLeafBytes;
  const std::int64_t slices = (count + leaves_per_slice - 1) / leaves_per_slice;
  for_slices(slices, options.threads, plan.converts(), [&](std::int64_t slice) {
    const std::int64_t last = std::min(count, (slice + 1) * leaves_per_slice);
    for (std::int64_t leaf = slice * leaves_per_slice; leaf < last; leaf += kFusedLeaves) {
      const std::int64_t step = std::min(kFusedLeaves, last - leaf);
      const std::int64_t begin = (first + leaf) * kLeafBytes;
      mover.run(begin, std::min(begin + step * kLeafBytes, plan.total_bytes()));
      digest_leaves(plan, Side::source, source_regions, first + leaf,
                    leaves.subspan(static_cast<std::size_t>(leaf), static_cast<std::size_t>(step)));
    }
  });
}

void gather_range(const Plan& plan, std::span<const std::byte* const> source_regions, std::int64_t begin,
                  std::int64_t end, std::byte* packed, const MoveVariant& variant) {
  Mover(plan, {.regions = source_regions}, {.packed = packed, .begin = begin}, false, *variant.rows).run(begin, end);
}

void fetch_ahead(const Plan& plan, std::span<const std::byte* const> source_regions, std::int64_t begin,
                 std::int64_t end) {
  constexpr std::int64_t kLine = 64;
  constexpr std::int64_t kBeginning = 8 * kLine;
  Cursor cursor(plan, begin, end, Walk::source);
  Run run;
  while (cursor.next(run)) {
    const std::byte* data = source_regions[static_cast<std::size_t>(run.source_region)] + run.source_offset;
    for (std::int64_t at = 0; at < std::min(run.bytes, kBeginning); at += kLine) __builtin_prefetch(data + at);
  }
}

void scatter_range(const Plan& plan, const std::byte* packed, std::span<std::byte* const> target_regions,
                   std::int64_t begin, std::int64_t end, const MoveVariant& variant) {
  std::optional<DefaultRounding> rounding;
  if (plan.converts()) {
    if (!plan.cuts_no_element()) throw std::invalid_argument("leaves of this plan cut elements that are converted");
    rounding.emplace();
  }
  Mover(plan, {.packed = packed, .begin = begin}, {.regions = target_regions}, true, *variant.rows).run(begin, end);
}

}  // namespace kvlink
