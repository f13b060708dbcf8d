#include "staging.hpp"

#include <errno.h>
#include <sys/mman.h>

#include <system_error>

namespace kvlink {
namespace {

constexpr std::size_t kHugePageBytes = 2 << 20;

}  // namespace

HugeMemory::HugeMemory(std::size_t bytes) : bytes_((bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes) {
  // One page more than is wanted, for its alignment; what lies around it is given back.
  const std::size_t mapped = bytes_ + kHugePageBytes;
  void* found = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "staging memory");
  auto* first = static_cast<std::byte*>(found);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(first) & (kHugePageBytes - 1);
  if (before > 0) munmap(first, before);
  data_ = first + before;
  munmap(data_ + bytes_, kHugePageBytes - before);
  madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: without it everything works
}

HugeMemory::~HugeMemory() { munmap(data_, bytes_); }

Slots::Slots(std::byte* data, std::size_t count, std::int64_t slot_bytes)
    : data_(data), count_(count), slot_bytes_(slot_bytes) {
  for (std::size_t slot = count; slot-- > 0;) free_.push_back(slot);
}

std::optional<std::size_t> Slots::take() {
  if (free_.empty()) return std::nullopt;
  const std::size_t slot = free_.back();
  free_.pop_back();
  return slot;
}

}  // namespace kvlink
