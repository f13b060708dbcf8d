// Memory that processes of one host share: what we give a peer to map, and what we map of a peer's. A peer only ever
// reads ours, and we only ever read a peer's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvlink {

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Where a region of ours lies in a file that a peer may map.
struct Backing {
  // Takes a duplicate of `fd`. Throws std::invalid_argument unless the file is sealed against shrinking and against
  // others' writing: nobody is given memory of ours that they could spoil.
  Backing(int fd, std::uint64_t offset, std::uint64_t bytes);

  Descriptor descriptor;
  std::uint64_t offset;
  std::uint64_t bytes;
};

// Of a fixed size, zeroed, writable by us alone: the file is sealed once we have mapped it.
class SharedMemory {
 public:
  // Throws std::system_error.
  SharedMemory(const char* name, std::size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return descriptor_.fd(); }

 private:
  Descriptor descriptor_;
  std::size_t bytes_;
  std::byte* data_;
};

// A stretch of a peer's file, mapped read-only. It can neither shrink nor lose pages while we read it: seals say so.
class PeerMemory {
 public:
  // Throws ProtocolViolation if the file is not one that cannot shrink, or does not have the stretch; and
  // std::system_error if it cannot be mapped.
  PeerMemory(const Descriptor& file, std::uint64_t offset, std::uint64_t bytes);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  const std::byte* data() const { return data_; }
  // Fills in page tables for some more of what the peer has, in under a millisecond: a page that is first read costs a
  // fault otherwise (4 us for each 64 KiB, measured). Reads no page that the peer never touched: that would take memory
  // for it. False once all is done, or where the system cannot.
  bool touch_some() const;

 private:
  void* mapped_;
  mutable std::size_t touched_bytes_ = 0;
  std::size_t mapped_bytes_;
  const std::byte* data_;
};

}  // namespace kvlink
