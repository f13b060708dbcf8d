#include "events.hpp"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

namespace kvlink {

EventFd::EventFd() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

EventFd::~EventFd() { close(fd_); }

// Neither can fail in a way that matters: a full counter is readable, an empty one is clear.
void EventFd::signal() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(fd_, &one, sizeof one);
}

std::uint64_t EventFd::clear() const {
  std::uint64_t count = 0;
  return read(fd_, &count, sizeof count) == sizeof count ? count : 0;
}

void CompletionQueue::push(Completion completion) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(completion));
    if (waiting_.size() > 1) return;
  }
  event_.signal();
}

std::vector<Completion> CompletionQueue::pop(std::size_t limit) {
  const std::lock_guard lock(mutex_);
  const auto count = static_cast<std::ptrdiff_t>(std::min(limit, waiting_.size()));
  std::vector<Completion> popped(std::make_move_iterator(waiting_.begin()),
                                 std::make_move_iterator(waiting_.begin() + count));
  waiting_.erase(waiting_.begin(), waiting_.begin() + count);
  return popped;
}

bool CompletionQueue::arm() {
  const std::lock_guard lock(mutex_);
  if (!waiting_.empty()) return false;
  event_.clear();
  return true;
}

}  // namespace kvlink
