#include "carry.hpp"

#include <algorithm>
#include <array>
#include <cfenv>
#include <stdexcept>

#include "isa.hpp"
#include "leaves.hpp"
#include "scout.hpp"

namespace kvlink {
namespace {

// Asking and moving take turns in pieces: more at a time than a core can wait for would stall both (measured).
constexpr std::int64_t kPieceBytes = 256;
constexpr std::int64_t kStringPieceBytes = 4096;
// What is converted is packed in between, in steps that stay in a core's cache.
constexpr std::int64_t kPackedBytes = 2 * kLeafBytes;

// --- ahead of the walk ----------------------------------------------------------------------------------------------

class PackedScout {
 public:
  PackedScout(const Place<const std::byte>& from, std::int64_t begin)
      : data_(from.packed + (begin - from.begin) + kAheadBytes) {}

  void fetch(std::int64_t bytes) {
    fetch_lines(data_, bytes, false);
    data_ += bytes;
  }

 private:
  const std::byte* data_;
};

// --- what is done with what was carried -----------------------------------------------------------------------------

struct Nothing {
  std::int64_t piece_bytes = kPieceBytes;
  std::int64_t room() const { return piece_bytes; }
  char* kept() { return nullptr; }
  void carried(std::int64_t) {}
};

struct Digested {
  Leaves leaves;
  std::int64_t room() const { return leaves.room(); }
  char* kept() { return reinterpret_cast<char*>(leaves.kept()); }
  void carried(std::int64_t bytes) { leaves.carried(bytes); }
};

// --- the walk -------------------------------------------------------------------------------------------------------

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

class Carrier {
 public:
  Carrier(const Plan& plan, const Place<const std::byte>& from, const Place<std::byte>& to, const CarryOptions& options)
      : plan_(plan), from_(from), to_(to), options_(options), rows_(*options.variant.rows),
        walk_(to.packed != nullptr     ? Walk::source
              : from.packed != nullptr ? Walk::target
                                       : Walk::both) {}

  template <typename Each>
  void run(std::int64_t begin, std::int64_t end, Each&& each) const {
    if (from_.packed != nullptr) {
      PackedScout scout(from_, begin);
      walk(begin, end, scout, each);
    } else {
      Scout scout(plan_, Side::source, from_.regions, begin, Reads::once);
      walk(begin, end, scout, each);
    }
    rows_.fence();
  }

 private:
  template <typename AnyScout, typename Each>
  void walk(std::int64_t begin, std::int64_t end, AnyScout& scout, Each& each) const {
    Cursor cursor(plan_, begin, end, walk_);
    Rows rows;
    for (std::int64_t at = begin; cursor.next_rows(rows); at += rows.count * rows.bytes) {
      const auto* source = reinterpret_cast<const char*>(from_.find(rows.source_region, rows.source_offset, at));
      auto* target = reinterpret_cast<char*>(to_.find(rows.target_region, rows.target_offset, at));
      rows.source_stride = from_.stride(rows.source_stride, rows.bytes);
      rows.target_stride = to_.stride(rows.target_stride, rows.bytes);
      const auto& convert = plan_.parts()[rows.part].convert;
      if (convert && walk_ != Walk::source) {
        scout.fetch(rows.count * rows.bytes);
        convert_rows(*convert, rows, at - plan_.part_begin(rows.part), target, source);
      } else {
        move_rows(rows, target, source, scout, each);
      }
    }
  }

  // In pieces: as many whole rows as there is room for, or a part of one.
  template <typename AnyScout, typename Each>
  void move_rows(const Rows& rows, char* target, const char* source, AnyScout& scout, Each& each) const {
    const bool keep = each.kept() != nullptr;
    const MoveRows move = options_.stores == Stores::strings    ? rows_.strings
                          : options_.stores == Stores::streamed ? rows_.stream[keep]
                                                                : rows_.copy[keep];
    const RowStrides strides{rows.source_stride, rows.target_stride};
    std::int64_t inside = 0;  // the row
    for (std::int64_t row = 0; row < rows.count;) {
      const std::int64_t room = each.room();
      const std::int64_t rest = rows.bytes - inside;
      const std::int64_t piece = std::min(rest, room);
      const std::int64_t count = inside > 0 ? 1 : std::clamp<std::int64_t>(room / rows.bytes, 1, rows.count - row);
      scout.fetch(count * piece);
      move(target + row * strides.target + inside, each.kept(), source + row * strides.source + inside, count, strides,
           piece);
      each.carried(count * piece);
      row += piece == rest ? count : 0;
      inside = piece == rest ? 0 : inside + piece;
    }
  }

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
  const Place<const std::byte>& from_;
  const Place<std::byte>& to_;
  const CarryOptions& options_;
  const RowKernel& rows_;
  const Walk walk_;
};

// By way of packed bytes, which are hashed and then converted.
void convert_and_digest(const Plan& plan, const Place<const std::byte>& from, const Place<std::byte>& to,
                        std::int64_t begin, std::int64_t end, std::span<std::uint64_t> leaves,
                        const CarryOptions& options) {
  alignas(64) std::array<std::byte, kPackedBytes> packed;
  for (std::int64_t at = begin; at < end; at += kPackedBytes) {
    const std::int64_t stop = std::min(at + kPackedBytes, end);
    if (from.packed != nullptr) {
      std::copy_n(from.packed + (at - from.begin), stop - at, packed.data());
    } else {
      carry(plan, from, {.packed = packed.data(), .begin = at}, at, stop, {.variant = options.variant});
    }
    digest_packed(packed.data(), stop - at, leaves.subspan(static_cast<std::size_t>((at - begin) / kLeafBytes)));
    carry(plan, {.packed = packed.data(), .begin = at}, to, at, stop, options);
  }
}

// Leaf by leaf, so that each is hashed while it is near.
void pack_and_digest(const Plan& plan, const Place<const std::byte>& from, const Place<std::byte>& to,
                     std::int64_t begin, std::int64_t end, std::span<std::uint64_t> leaves,
                     const CarryOptions& options) {
  for (std::int64_t at = begin; at < end; at += kLeafBytes) {
    const std::int64_t stop = std::min(at + kLeafBytes, end);
    carry(plan, from, to, at, stop, options);
    digest_packed(to.packed + (at - to.begin), stop - at,
                  leaves.subspan(static_cast<std::size_t>((at - begin) / kLeafBytes)));
  }
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

void carry(const Plan& plan, const Place<const std::byte>& from, const Place<std::byte>& to, std::int64_t begin,
           std::int64_t end, const CarryOptions& options) {
  const Carrier carrier(plan, from, to, options);
  if (to.packed != nullptr || !plan.converts()) {
    return carrier.run(begin, end, Nothing{options.stores == Stores::strings ? kStringPieceBytes : kPieceBytes});
  }
  if (from.packed != nullptr && !plan.cuts_no_element()) {
    throw std::invalid_argument("leaves of this plan cut elements that are converted");
  }
  const DefaultRounding rounding;
  carrier.run(begin, end, Nothing());
}

void carry_and_digest(const Plan& plan, const Place<const std::byte>& from, const Place<std::byte>& to,
                      std::int64_t begin, std::int64_t end, std::span<std::uint64_t> leaves,
                      const CarryOptions& options) {
  if (to.packed == nullptr && plan.converts()) return convert_and_digest(plan, from, to, begin, end, leaves, options);
  if (to.packed != nullptr && options.stores == Stores::strings) {
    return pack_and_digest(plan, from, to, begin, end, leaves, options);
  }
  Carrier(plan, from, to, options).run(begin, end, Digested{Leaves(end - begin, leaves)});
}

bool has_runs_of(const Plan& plan, Side side, std::int64_t bytes) {
  return std::all_of(plan.parts().begin(), plan.parts().end(), [side, bytes](const Plan::Part& part) {
    return part.nest(walk_of(side)).run_bytes >= bytes;
  });
}

}  // namespace kvlink
