// The pieces of memory of one scatter-gather call, consumed as the socket takes or fills them.
#pragma once

#include <limits.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <vector>

#include "plan.hpp"

namespace kvlink {

class Iovecs {
 public:
  static constexpr std::size_t kMax = IOV_MAX;  // 1,024 on Linux

  bool empty() const { return first_ == pieces_.size(); }
  bool full() const { return pieces_.size() == kMax; }

  void add(const void* data, std::size_t bytes) {
    if (bytes > 0) pieces_.push_back({const_cast<void*>(data), bytes});
  }
  // Adds the runs of one side of a plan while there is room, less `keep` pieces; false once the cursor is at its end.
  bool add_runs(Cursor& cursor, Side side, std::span<const std::byte* const> regions, std::size_t keep);
  // Adds all runs of wire bytes [begin, end) of one side; the caller knows that there is room.
  void add_runs(const Plan& plan, std::int64_t begin, std::int64_t end, Side side,
                std::span<const std::byte* const> regions) {
    Cursor cursor(plan, begin, end, walk_of(side));
    add_runs(cursor, side, regions, 0);
  }

  // Adds the last `left` of an object's bytes: those that have not passed yet.
  void add_rest(const void* data, std::size_t bytes, std::size_t left) {
    add(static_cast<const std::byte*>(data) + (bytes - left), left);
  }

  void consume(std::size_t bytes);
  void clear() {
    pieces_.clear();
    first_ = 0;
  }
  // An idle lane holds no memory for them.
  void release() {
    std::vector<iovec>().swap(pieces_);
    first_ = 0;
  }

  std::span<const iovec> left() const { return std::span(pieces_).subspan(first_); }
  msghdr message() {
    msghdr header{};
    header.msg_iov = pieces_.data() + first_;
    header.msg_iovlen = pieces_.size() - first_;
    return header;
  }

 private:
  std::vector<iovec> pieces_;
  std::size_t first_ = 0;
};

}  // namespace kvlink
