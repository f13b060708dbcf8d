#include "shared_engine.hpp"

#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "threads.hpp"

namespace kvlink {
namespace {

using namespace std::chrono_literals;

// Moving goes on this long before commands, channels and timers are looked at again.
constexpr Duration kMoveSlice = 500us;
// After the last word that came from a peer, the next is waited for this long without sleep: a sleeper takes about as
// long to wake. In bursts, so that commands and channels are not kept waiting.
constexpr Duration kLinger = 100us;
constexpr Duration kBurst = 20us;
constexpr int kLanesPerCall = 64;

}  // namespace

// --- the thread -----------------------------------------------------------------------------------------------------

SharedThread::SharedThread(std::shared_ptr<SharedCore> core, std::size_t copy_threads)
    : EngineThread(core), core_(std::move(core)) {
  core_->copiers = std::make_unique<CopyPool>(copy_threads, [this] { commands().push(command::Nudge{}); });
  wake_on(core_->lanes.fd());
}

bool SharedThread::move() {
  wake_all();
  hear_lanes();
  core_->copiers->keep_clear_of_here();
  for (const Time end = Clock::now() + kMoveSlice;;) {
    SharedPeer::Step all;
    each_peer([&all](Peer& peer) {
      const auto step = static_cast<SharedPeer&>(peer).step();
      all.any |= step.any;
      all.over |= step.over;
    });
    const Time now = Clock::now();
    if (all.any) last_moved_ = now;
    if (all.over) return true;
    if (!all.any) return copying_beside(now) || linger(now) || prepare();
    if (now >= end) return true;
  }
}

void SharedThread::hear_lanes() {
  epoll_event events[kLanesPerCall];
  const int count = epoll_wait(core_->lanes.fd(), events, kLanesPerCall, 0);
  for (int i = 0; i < count; ++i) static_cast<SharedPeer*>(events[i].data.ptr)->hear();
}

bool SharedThread::prepare() {
  bool any = false;
  each_peer([&any](Peer& peer) { any = any || static_cast<SharedPeer&>(peer).prepare(); });
  return any;
}

// The last pieces of a read are with helpers. They nudge; but for so short a while it is not worth to fall asleep.
bool SharedThread::copying_beside(Time now) const { return core_->copiers->copying() && now - last_moved_ < kLinger; }

// True if there may be something to do at once. A waiter that finds its peer on its own CPU gets out of its way: to a
// CPU that nobody wants, or to sleep.
bool SharedThread::linger(Time now) {
  if (now - last_moved_ > kLinger) return false;
  for (const Time end = now + kBurst; now < end; now = Clock::now()) {
    bool expecting = false;
    bool news = false;
    bool beside = false;
    int working = 0;
    each_peer([&](Peer& any) {
      auto& peer = static_cast<SharedPeer&>(any);
      if (!peer.expecting()) return;
      expecting = true;
      news |= peer.news();
      if (!peer.peer_is_on_this_cpu()) return;
      beside = true;
      working += peer.peer_is_awake() ? 1 : 0;
    });
    if (!expecting) return false;
    if (news) break;
    if (beside && !spread_.step_aside(now, working)) return false;
    relax_cpu();
  }
  sched_yield();  // to our own interpreter, which may have been waiting for this very CPU
  return true;
}

bool SharedThread::may_sleep() {
  bool news = false;
  dozing_ = true;
  each_peer([&news](Peer& peer) { news |= !static_cast<SharedPeer&>(peer).doze(); });
  return !news;
}

Time SharedThread::wake_by() {
  Time next = Time::max();
  each_peer([&next](Peer& peer) { next = std::min(next, static_cast<SharedPeer&>(peer).put_off_until()); });
  return next;
}

void SharedThread::wake_all() {
  if (!std::exchange(dozing_, false)) return;
  each_peer([](Peer& peer) { static_cast<SharedPeer&>(peer).wake(); });
}

// --- the calls ------------------------------------------------------------------------------------------------------

SharedEngine::SharedEngine(const EngineLimits& limits, std::size_t copy_threads)
    : SharedEngine(std::make_shared<SharedCore>(limits), copy_threads) {}

SharedEngine::SharedEngine(std::shared_ptr<SharedCore> core, std::size_t copy_threads)
    : Engine("kvlink-shared", core, std::make_unique<SharedThread>(core, copy_threads)), core_(std::move(core)) {}

SharedEngine::~SharedEngine() { close(); }

void SharedEngine::keep_to(const std::vector<int>& cpus) {
  Engine::keep_to(cpus);
  for (std::thread& thread : core_->copiers->threads()) keep_to_cpus(thread, cpus);
}

void SharedEngine::closed() { core_->copiers->stop(); }

std::shared_ptr<const void> SharedEngine::hold(std::uint64_t, std::uint64_t) { return nullptr; }

void SharedEngine::register_region(std::size_t region, std::uint64_t address, std::uint64_t length) {
  Engine::register_region(region, address, length);
  tell_of(region, {address, length});
}

void SharedEngine::register_backed(std::size_t region, std::uint64_t address, std::uint64_t length, int fd,
                                   std::uint64_t offset) {
  auto backing = std::make_shared<const Backing>(fd, offset, length);
  Engine::register_region(region, address, length);
  tell_of(region, {address, length, std::move(backing)});
}

void SharedEngine::tell_of(std::size_t region, OwnRegion own) {
  const std::lock_guard lock(core_->mutex);
  core_->regions[region] = std::move(own);
}

void SharedEngine::unregister_region(std::size_t region) {
  Engine::unregister_region(region);
  const std::lock_guard lock(core_->mutex);
  core_->regions.erase(region);
}

bool SharedEngine::is_backed(std::size_t region) const {
  static_cast<void>(held(region));
  const std::lock_guard lock(core_->mutex);
  return core_->regions.at(region).backing != nullptr;
}

void SharedEngine::import_region(const std::string& peer, std::size_t region, std::uint64_t length, bool mappable) {
  learn_region(peer, region, length, std::make_shared<const SharedRegion>(length, mappable));
}

std::uint64_t SharedEngine::connect(const std::string& peer, int channel_fd, int lane_fd) {
  auto channel = std::make_unique<Channel>(channel_fd);
  auto lane = std::make_shared<std::unique_ptr<SharedLane>>(std::make_unique<SharedLane>(lane_fd));
  return Engine::connect(peer, std::move(channel), [core = core_, peer, lane](std::unique_ptr<Channel> authenticated) {
    return std::make_unique<SharedPeer>(*core, peer, std::move(authenticated), std::move(*lane));
  });
}

std::shared_ptr<ActiveRead> SharedEngine::make_read(ReadSpec spec, std::shared_ptr<const LocalRegions> to,
                                                    std::shared_ptr<const RemoteRegions> from) {
  return std::make_shared<SharedRead>(std::move(spec), std::move(to), std::move(from));
}

}  // namespace kvlink
