#include "shared_pull.hpp"

#include <errno.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

#include "carry.hpp"
#include "digest.hpp"
#include "iovecs.hpp"

namespace kvlink {
namespace {

// What is converted, hashed, or short at the target is brought here first: a buffer that stays in a core's cache. A
// call for less costs more (128 KiB: 5 to 10% slower, measured).
constexpr std::int64_t kBounceBytes = 256 * 1024;

// The kernel puts shorter runs into place slower than we do.
constexpr std::int64_t kInPlaceRunBytes = 4096;

struct Bounce {
  alignas(64) std::array<std::byte, kBounceBytes> bytes;
};

// Of the calling thread's own; made when it first pulls.
std::byte* bounce() {
  thread_local const auto buffer = std::make_unique_for_overwrite<Bounce>();
  return buffer->bytes.data();
}

void* far_address(const Run& run, std::span<const FarRegion> from) {
  const auto number = static_cast<std::size_t>(run.source_region);
  const FarRegion region = number < from.size() ? from[number] : FarRegion{};
  const auto offset = static_cast<std::uint64_t>(run.source_offset);
  const auto bytes = static_cast<std::uint64_t>(run.bytes);
  if (offset > region.bytes || bytes > region.bytes - offset) {
    throw std::invalid_argument("a run leaves region " + std::to_string(number) + " of the source's process");
  }
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(region.address + offset));
}

// A plan's runs there, in wire order, filled up as they are consumed.
class FarRuns {
 public:
  FarRuns(const Plan& plan, std::span<const FarRegion> from, std::int64_t begin, std::int64_t end)
      : from_(from), cursor_(plan, begin, end, Walk::source) {}

  Iovecs& fill() {
    for (Run run; !pieces_.full() && cursor_.next(run);) {
      pieces_.add(far_address(run, from_), static_cast<std::size_t>(run.bytes));
    }
    return pieces_;
  }

 private:
  const std::span<const FarRegion> from_;
  Cursor cursor_;
  Iovecs pieces_;
};

// As many bytes as both sides name. The kernel may stop short of memory that is not there; the next call says so.
void read_some(pid_t pid, Iovecs& here, Iovecs& there) {
  const auto ours = here.left();
  const auto theirs = there.left();
  const ssize_t got = process_vm_readv(pid, ours.data(), ours.size(), theirs.data(), theirs.size(), 0);
  if (got < 0) throw std::system_error(errno, std::generic_category(), "the source's memory");
  if (got == 0) throw std::system_error(EFAULT, std::generic_category(), "the source's memory");
  here.consume(static_cast<std::size_t>(got));
  there.consume(static_cast<std::size_t>(got));
}

void pull_into_place(pid_t pid, const Plan& plan, std::span<const FarRegion> from, std::span<std::byte* const> to,
                     std::int64_t begin, std::int64_t end) {
  FarRuns there(plan, from, begin, end);
  Cursor cursor(plan, begin, end, Walk::target);
  Iovecs here;
  for (;;) {
    here.add_runs(cursor, Side::target, to, 0);
    if (here.empty()) return;
    read_some(pid, here, there.fill());
  }
}

void pull_packed(pid_t pid, std::byte* packed, std::int64_t bytes, FarRuns& there) {
  Iovecs here;
  here.add(packed, static_cast<std::size_t>(bytes));
  while (!here.empty()) read_some(pid, here, there.fill());
}

}  // namespace

void pull(pid_t pid, const Plan& plan, std::span<const FarRegion> from, std::span<std::byte* const> to,
          std::int64_t begin, std::int64_t end, std::span<std::uint64_t> leaves) {
  if (leaves.empty() && !plan.converts() && has_runs_of(plan, Side::target, kInPlaceRunBytes)) {
    return pull_into_place(pid, plan, from, to, begin, end);
  }
  std::byte* const packed = bounce();
  FarRuns there(plan, from, begin, end);
  for (std::int64_t at = begin; at < end; at += kBounceBytes) {
    const std::int64_t stop = std::min(at + kBounceBytes, end);
    pull_packed(pid, packed, stop - at, there);
    const Place<const std::byte> place{.packed = packed, .begin = at};
    if (leaves.empty()) {
      carry(plan, place, {.regions = to}, at, stop, {.stores = Stores::streamed});
    } else {
      const auto first = static_cast<std::size_t>((at - begin) / kLeafBytes);
      const auto count = static_cast<std::size_t>(leaf_count(stop - at));
      carry_and_digest(plan, place, {.regions = to}, at, stop, leaves.subspan(first, count),
                       {.stores = Stores::streamed});
    }
  }
}

}  // namespace kvlink
