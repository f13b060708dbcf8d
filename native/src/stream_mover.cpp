#include "stream_mover.hpp"

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace kvlink {
namespace {

constexpr int kEventsPerWait = 64;
constexpr std::size_t kScratchBytes = 256 * 1024;

}  // namespace

Mover::Mover(Reports reports)
    : reports_(std::move(reports)), epoll_(epoll_create1(EPOLL_CLOEXEC)), scratch_(kScratchBytes) {
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (epoll_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, commands_.fd(), &event) < 0) {
    const int error = errno;
    if (epoll_ >= 0) ::close(epoll_);
    throw std::system_error(error, std::generic_category(), "epoll");
  }
}

Mover::~Mover() { ::close(epoll_); }

void Mover::run() {
  while (!done_) {
    const Time until = wake_by();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    turn(until == Time::max() ? -1 : static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000)));
  }
}

Time Mover::wake_by() const {
  Time next = Time::max();
  for (const auto& lane : lanes_) next = std::min(next, lane->ask_at());
  return next;
}

void Mover::ask_again() {
  const Time now = Clock::now();
  for (const auto& lane : lanes_) {
    if (lane->fd() >= 0 && lane->ask_at() <= now && lane->ask()) schedule(*lane, false, true);
  }
}

bool Mover::turn(int timeout_ms) {
  obey();
  ask_again();
  epoll_event events[kEventsPerWait];
  const int count = done_ ? 0 : epoll_wait(epoll_, events, kEventsPerWait, active_.empty() ? timeout_ms : 0);
  for (int i = 0; i < count; ++i) {
    auto* lane = static_cast<Lane*>(events[i].data.ptr);
    if (lane == nullptr) {
      obey();
    } else {
      schedule(*lane, events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR), events[i].events & EPOLLOUT);
    }
  }
  stepping_.swap(active_);
  for (Lane* lane : stepping_) step(*lane);
  stepping_.clear();
  return !active_.empty();
}

// --- lanes ----------------------------------------------------------------------------------------------------------

void Mover::obey() {
  taken_.clear();
  commands_.take(taken_);
  for (auto& [word, lane] : taken_) {
    switch (word) {
      case Word::add: {
        lanes_.push_back(lane);
        epoll_event event{.events = EPOLLIN, .data = {.ptr = lane.get()}};
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, lane->fd(), &event) < 0) {
          lose(*lane, "lane cannot be waited for: " + std::generic_category().message(errno));
        }
        break;
      }
      case Word::poke:
        if (lane->fd() >= 0 && lane->ask()) schedule(*lane, false, true);
        break;
      case Word::drop: forget(lane); break;
      case Word::stop: done_ = true; break;
    }
  }
}

void Mover::forget(const std::shared_ptr<Lane>& lane) {
  if (lane->fd() >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, lane->fd(), nullptr);
  lane->close();
  std::erase(active_, lane.get());
  std::erase(lanes_, lane);
  reports_.read_over();
}

void Mover::schedule(Lane& lane, bool receive, bool send) {
  if (lane.fd() < 0 || (!receive && !send)) return;
  if (!lane.receiving && !lane.sending) active_.push_back(&lane);
  lane.receiving |= receive;
  lane.sending |= send;
}

// One receive and one send, so that neither direction, nor another lane, waits for more than a call's worth.
void Mover::step(Lane& lane) {
  const bool receiving = std::exchange(lane.receiving, false);
  const bool sending = std::exchange(lane.sending, false);
  try {
    bool receive_more = false;
    if (receiving) {
      const auto received = lane.receive(scratch_);
      receive_more = received.step == LaneStep::more;
      if (received.over) reports_.read_over();
    }
    const bool blocked = lane.watching_write && !sending;
    const LaneStep sent = blocked ? LaneStep::blocked : lane.send();
    watch(lane, sent == LaneStep::blocked);
    schedule(lane, receive_more, sent == LaneStep::more);
  } catch (const std::exception& error) {
    lose(lane, error.what());
  }
}

void Mover::lose(Lane& lane, std::string detail) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, lane.fd(), nullptr);
  lane.close();
  lane.receiving = lane.sending = false;
  std::erase(active_, &lane);
  reports_.lane_lost(lane.peer(), std::move(detail));
}

void Mover::watch(Lane& lane, bool write) {
  if (lane.watching_write == write) return;
  lane.watching_write = write;
  epoll_event event{.events = EPOLLIN | (write ? EPOLLOUT : 0u), .data = {.ptr = &lane}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, lane.fd(), &event);
}

}  // namespace kvlink
