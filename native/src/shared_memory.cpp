#include "shared_memory.hpp"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <system_error>

#include "channel.hpp"

namespace kvlink {
namespace {

// The C library's headers may be older than the kernel (Linux 5.1).
constexpr int kSealFutureWrite = 0x0010;
// A file of huge pages can be mapped only from their borders, and transparent ones are only used there.
constexpr std::uint64_t kHugePageBytes = 2 * 1024 * 1024;
constexpr int kMadvPopulateRead = 22;  // Linux 5.14
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kTouchBytes = 8 * 1024 * 1024;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Whether a file is one that neither shrinks nor is written through descriptors and mappings made from now on.
bool is_sealed(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) && (seals & (F_SEAL_WRITE | kSealFutureWrite));
}

std::uint64_t size_of(int fd) {
  struct stat status;
  if (fstat(fd, &status) < 0) fail("memory to share");
  return static_cast<std::uint64_t>(status.st_size);
}

bool has(std::uint64_t size, std::uint64_t offset, std::uint64_t bytes) {
  return bytes > 0 && bytes <= size && offset <= size - bytes;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Backing::Backing(int fd, std::uint64_t at, std::uint64_t length)
    : descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0)), offset(at), bytes(length) {
  if (!descriptor) fail("memory to share");
  if (!is_sealed(fd)) throw std::invalid_argument("the region's file is not sealed against shrinking and writing");
  if (!has(size_of(fd), offset, bytes)) throw std::invalid_argument("the region's file does not have the region");
}

SharedMemory::SharedMemory(const char* name, std::size_t bytes)
    : descriptor_(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)), bytes_(bytes) {
  if (!descriptor_ || ftruncate(fd(), static_cast<off_t>(bytes)) < 0) fail("memory to share");
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd(), 0);
  if (mapped == MAP_FAILED) fail("memory to share");
  data_ = static_cast<std::byte*>(mapped);
  if (fcntl(fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | kSealFutureWrite | F_SEAL_SEAL) < 0) {
    const int error = errno;
    munmap(mapped, bytes);
    throw std::system_error(error, std::generic_category(), "memory to share cannot be sealed");
  }
}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

PeerMemory::PeerMemory(const Descriptor& file, std::uint64_t offset, std::uint64_t bytes) {
  if (!is_sealed(file.fd())) throw ProtocolViolation("memory that is not sealed against shrinking and writing");
  if (const std::uint64_t size = size_of(file.fd()); !has(size, offset, bytes)) {
    throw ProtocolViolation("memory of " + std::to_string(size) + " bytes, of which " + std::to_string(bytes) +
                            " from " + std::to_string(offset) + " on were told");
  }
  const std::uint64_t begin = offset / kHugePageBytes * kHugePageBytes;
  mapped_bytes_ = offset + bytes - begin;
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ, MAP_SHARED, file.fd(), static_cast<off_t>(begin));
  if (mapped_ == MAP_FAILED) fail("a peer's memory cannot be mapped");
  madvise(mapped_, mapped_bytes_, MADV_HUGEPAGE);  // where shared memory may have them; harmless elsewhere
  data_ = static_cast<const std::byte*>(mapped_) + (offset - begin);
}

bool PeerMemory::touch_some() const {
  const std::size_t bytes = std::min(kTouchBytes, mapped_bytes_ - touched_bytes_);
  if (bytes == 0) return false;
  std::byte* const begin = static_cast<std::byte*>(mapped_) + touched_bytes_;
  std::array<unsigned char, kTouchBytes / kPageBytes> there;
  bool filled = mincore(begin, bytes, there.data()) == 0;
  const std::size_t pages = (bytes + kPageBytes - 1) / kPageBytes;
  for (std::size_t first = 0, page = 0; filled && page < pages; first = page) {
    const bool present = there[first] & 1;
    while (page < pages && (there[page] & 1) == present) ++page;
    if (present) filled = madvise(begin + first * kPageBytes, (page - first) * kPageBytes, kMadvPopulateRead) == 0;
  }
  touched_bytes_ = filled ? touched_bytes_ + bytes : mapped_bytes_;
  return filled;
}

PeerMemory::~PeerMemory() { munmap(mapped_, mapped_bytes_); }

}  // namespace kvlink
