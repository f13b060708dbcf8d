#include "engine_thread.hpp"

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>

namespace kvlink {
namespace {

constexpr int kEventsPerWait = 64;

void set_state(PeerLink& link, PeerLink::State state) {
  const std::lock_guard lock(link.mutex);
  link.state = state;
}

}  // namespace

EngineThread::EngineThread(std::shared_ptr<EngineCore> core)
    : core_(std::move(core)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll");
  try {
    wake_on(commands_.fd());
  } catch (...) {
    ::close(epoll_);
    throw;
  }
}

EngineThread::~EngineThread() { ::close(epoll_); }

void EngineThread::wake_on(int fd) {
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) < 0) {
    throw std::system_error(errno, std::generic_category(), "epoll");
  }
}

// Nothing may leave the thread: an unexpected failure ends in completions like any other.
void EngineThread::run() {
  while (!done_) {
    try {
      turn();
    } catch (const std::exception& error) {
      lose_all(error.what());
    }
  }
  if (abandoned_) abandon();
}

void EngineThread::turn() {
  ++turn_;
  obey_all();
  const Time now = Clock::now();
  if (now >= next_timers_) run_timers(now);
  const Time settled = settle(now);
  const bool busy = move();
  if (close_by_ && members_.empty()) done_ = true;
  if (close_by_ && now >= *close_by_) done_ = abandoned_ = true;
  if (!done_) wait(busy, std::min({next_timers_, settled, close_by_.value_or(Time::max()), wake_by()}));
}

// --- commands -------------------------------------------------------------------------------------------------------

// Should one fail, run() catches it and the next turn goes on with the one after it.
void EngineThread::obey_all() {
  if (obeyed_ == taken_.size()) {
    taken_.clear();
    obeyed_ = 0;
    commands_.take(taken_);
  }
  while (obeyed_ < taken_.size()) {
    std::visit([this](auto& command) { obey(command); }, taken_[obeyed_++]);
  }
}

void EngineThread::obey(command::Connect& connect) {
  Completion end{.kind = CompletionKind::connected, .op = connect.op, .peer = connect.peer};
  auto state = PeerLink::State::up;
  try {
    auto peer = connect.make(std::move(connect.channel));
    auto& member = members_[connect.peer];
    member = {std::move(peer), connect.link};
    epoll_event event{.events = EPOLLIN, .data = {.ptr = &member}};
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, member.peer->channel()->fd(), &event) < 0) {
      member.peer->lose(std::string("channel cannot be waited for: ") + std::generic_category().message(errno));
    }
    next_timers_ = Time::min();
  } catch (const std::exception& error) {
    state = PeerLink::State::gone;
    end.outcome = Outcome::unreachable;
    end.detail = error.what();
  }
  set_state(*connect.link, state);
  core_->completions.push(std::move(end));
}

void EngineThread::obey(command::Disconnect& disconnect) {
  const auto found = members_.find(disconnect.peer);
  if (found != members_.end()) return found->second.peer->disconnect(disconnect.op);
  core_->completions.push({.kind = CompletionKind::disconnected, .op = disconnect.op, .peer = disconnect.peer});
}

void EngineThread::obey(command::StartRead& start) {
  members_.at(start.read->spec().peer).peer->read(std::move(start.read));
  look_at_timers_soon();
}

void EngineThread::obey(command::CutOff& cut_off) {
  const auto found = members_.find(cut_off.peer);
  if (found != members_.end()) return found->second.peer->cut_off(cut_off.op, cut_off.attempt);
  core_->completions.push({.kind = CompletionKind::cut_off,
                           .op = cut_off.op,
                           .peer = cut_off.peer,
                           .attempt = cut_off.attempt});
}

void EngineThread::obey(command::Forget& forget) {
  const auto found = members_.find(forget.peer);
  if (found != members_.end()) found->second.peer->forget(forget.attempt);
}

void EngineThread::obey(command::Lose& lose) {
  const auto found = members_.find(lose.peer);
  if (found != members_.end()) found->second.peer->lose(std::move(lose.detail));
}

void EngineThread::obey(command::LeaseBegan&) { look_at_timers_soon(); }

void EngineThread::obey(command::Close&) {
  close_by_ = Clock::now() + core_->limits.close_timeout;
  for (auto& [name, member] : members_) member.peer->disconnect(0);
}

// --- timers and ends ------------------------------------------------------------------------------------------------

void EngineThread::look_at_timers_soon() {
  next_timers_ = std::min(next_timers_, last_timers_ + core_->limits.heartbeat / 16);
}

// Looks at every peer and every lease, so it is done at most sixteen times a heartbeat.
void EngineThread::run_timers(Time now) {
  last_timers_ = now;
  Time next = Time::max();
  for (auto& [name, member] : members_) {
    next = std::min(next, member.peer->tick(now));
    watch(member);
  }
  lapsed_.clear();
  next = std::min(next, core_->exposures.sweep(Clock::now(), lapsed_));
  for (Lapse& lapse : lapsed_) {
    const auto member = members_.find(lapse.peer);
    if (member != members_.end()) member->second.peer->tell_lapsed(lapse.attempt);
    core_->completions.push({.kind = CompletionKind::lease_lapsed,
                             .peer = std::move(lapse.peer),
                             .attempt = lapse.attempt,
                             .detail = "not renewed for the lease's length"});
  }
  next_timers_ = std::max(next, now + core_->limits.heartbeat / 16);
}

Time EngineThread::settle(Time now) {
  Time next = Time::max();
  for (auto member = members_.begin(); member != members_.end();) {
    if (!member->second.peer->busy()) {
      ++member;
      continue;
    }
    next = std::min(next, member->second.peer->settle(now));
    if (member->second.peer->leaving() && !leave(member->second)) next = now;
    if (member->second.peer->over() && member->second.left_at_turn != turn_) {
      set_state(*member->second.link, PeerLink::State::gone);
      member->second.peer->finish();
      member = members_.erase(member);
    } else {
      ++member;
    }
  }
  return next;
}

// Refuses further reads; false the first time, when commands must be taken once more before the peer may end.
bool EngineThread::leave(Member& member) {
  if (member.left_at_turn != 0) return member.left_at_turn != turn_;
  member.left_at_turn = turn_;
  set_state(*member.link, PeerLink::State::leaving);
  return false;
}

void EngineThread::lose_all(const char* detail) {
  for (auto& [name, member] : members_) member.peer->lose(std::string("the engine failed: ") + detail);
}

// Members are leaked with all that their reads point to.
void EngineThread::abandon() {
  for (auto& [name, member] : members_) set_state(*member.link, PeerLink::State::gone);
  new std::map<std::string, Member>(std::move(members_));
  new std::shared_ptr<EngineCore>(core_);
}

// --- waiting ---------------------------------------------------------------------------------------------------------

void EngineThread::watch(Member& member) {
  const Channel* channel = member.peer->channel();
  if (channel == nullptr || channel->wants_write() == member.watching_write) return;
  member.watching_write = channel->wants_write();
  epoll_event event{.events = EPOLLIN | (member.watching_write ? EPOLLOUT : 0u), .data = {.ptr = &member}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, channel->fd(), &event);
}

void EngineThread::wait(bool busy, Time until) {
  for (auto& [name, member] : members_) watch(member);
  int timeout_ms = 0;
  if (!busy && may_sleep()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    timeout_ms = until == Time::max() ? -1 : static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
  }
  epoll_event events[kEventsPerWait];
  const int count = epoll_wait(epoll_, events, kEventsPerWait, timeout_ms);
  for (int i = 0; i < count; ++i) {
    auto* member = static_cast<Member*>(events[i].data.ptr);
    if (member == nullptr) continue;
    if (events[i].events & EPOLLOUT) member->peer->flush();
    if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) member->peer->receive();
  }
}

}  // namespace kvlink
