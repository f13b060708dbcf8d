#include "ucx_engine.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvlink {
namespace {

// Signals are the interpreter's: the engine's thread must not take them from it.
template <typename Body>
std::thread start_without_signals(Body body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(std::move(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

std::size_t checked(std::size_t region) {
  if (region >= static_cast<std::size_t>(kMaxRegions)) {
    throw std::invalid_argument("region " + std::to_string(region) + " is not below " + std::to_string(kMaxRegions));
  }
  return region;
}

}  // namespace

UcxEngine::UcxEngine(EngineSettings settings) : pid_(getpid()) {
  auto context = std::make_shared<UcxContext>(UcxApi::load(settings.libucp), settings.tls);
  core_ = std::make_shared<EngineCore>(std::move(settings), std::move(context));
  behind_ = std::make_unique<EngineThread>(core_);
  thread_ = start_without_signals([thread = behind_.get()] {
    pthread_setname_np(pthread_self(), "kvlink-ucx");
    thread->run();
  });
}

UcxEngine::~UcxEngine() { close(); }

bool UcxEngine::close() {
  if (!std::exchange(closed_, true)) {
    if (getpid() != pid_) {
      let_go();
      return true;
    }
    behind_->commands().push(command::Close{});
    thread_.join();
    local_ = std::make_shared<LocalRegions>();
    links_.clear();
  }
  return behind_ == nullptr || !behind_->abandoned();
}

// Leaks, on purpose: what a fork copied must not be torn down from the copy.
void UcxEngine::let_go() {
  new std::thread(std::move(thread_));
  new std::shared_ptr<EngineCore>(core_);
  new std::shared_ptr<const LocalRegions>(local_);
  [[maybe_unused]] auto* leaked = behind_.release();
}

void UcxEngine::require_open() const {
  if (closed_) throw std::runtime_error("the UCX transport is closed");
}

// --- regions --------------------------------------------------------------------------------------------------------

void UcxEngine::register_region(std::size_t region, std::uint64_t address, std::uint64_t length) {
  require_open();
  checked(region);
  if (length == 0 || length > static_cast<std::uint64_t>(kMaxOffsetBytes) || address + length < address) {
    throw std::invalid_argument("a region of " + std::to_string(length) + " bytes cannot be registered");
  }
  auto next = std::make_shared<LocalRegions>(*local_);
  if (region >= next->regions.size()) {
    next->regions.resize(region + 1);
    next->data.resize(region + 1, nullptr);
    next->lengths.resize(region + 1, 0);
  }
  if (next->regions[region]) throw std::invalid_argument("region " + std::to_string(region) + " is registered already");
  auto registered = std::make_shared<const UcxRegion>(core_->context, address, length);
  next->data[region] = registered->data();
  next->lengths[region] = static_cast<std::int64_t>(length);
  next->regions[region] = std::move(registered);
  local_ = std::move(next);
}

void UcxEngine::unregister_region(std::size_t region) {
  require_region(region);
  auto next = std::make_shared<LocalRegions>(*local_);
  next->regions[region] = nullptr;
  next->data[region] = nullptr;
  next->lengths[region] = 0;
  local_ = std::move(next);
}

std::shared_ptr<const UcxRegion> UcxEngine::require_region(std::size_t region) const {
  require_open();
  if (region >= local_->regions.size() || !local_->regions[region]) {
    throw std::invalid_argument("region " + std::to_string(region) + " is not registered");
  }
  return local_->regions[region];
}

RemoteKey UcxEngine::export_key(std::size_t region) const {
  const auto registered = require_region(region);
  return {registered->address(), registered->length(), registered->pack_key()};
}

// --- peers ----------------------------------------------------------------------------------------------------------

std::uint64_t UcxEngine::connect(const std::string& peer, Bytes address, int channel_fd) {
  auto channel = std::make_unique<Channel>(channel_fd);  // takes the descriptor over, whatever follows
  require_open();
  if (!channel->end().empty()) throw std::runtime_error(channel->end());
  auto& link = links_[peer];
  if (link) {
    const std::lock_guard lock(link->mutex);
    if (link->state != PeerLink::State::gone) throw std::runtime_error("peer " + peer + " is connected already");
  }
  link = std::make_shared<PeerLink>();
  behind_->commands().push(command::Connect{++last_op_, peer, std::move(address), std::move(channel), link});
  return last_op_;
}

std::shared_ptr<PeerLink> UcxEngine::require_link(const std::string& peer) const {
  require_open();
  const auto found = links_.find(peer);
  if (found == links_.end()) throw std::runtime_error("peer " + peer + " is not connected");
  return found->second;
}

void UcxEngine::import_key(const std::string& peer, std::size_t region, RemoteKey key) {
  const auto link = require_link(peer);
  checked(region);
  if (key.length > static_cast<std::uint64_t>(kMaxOffsetBytes) || key.address + key.length < key.address) {
    throw std::invalid_argument("peer " + peer + " tells of a region of " + std::to_string(key.length) + " bytes");
  }
  const std::lock_guard lock(link->mutex);
  if (link->state != PeerLink::State::up) throw std::runtime_error("peer " + peer + " is not connected");
  auto next = std::make_shared<RemoteRegions>(*link->remote);
  if (region >= next->keys.size()) {
    next->keys.resize(region + 1);
    next->lengths.resize(region + 1, 0);
  }
  next->lengths[region] = static_cast<std::int64_t>(key.length);
  next->keys[region] = std::make_shared<const RemoteKey>(std::move(key));
  link->remote = std::move(next);
}

std::uint64_t UcxEngine::disconnect(const std::string& peer) {
  require_open();
  behind_->commands().push(command::Disconnect{++last_op_, peer});
  return last_op_;
}

// --- source side ----------------------------------------------------------------------------------------------------

void UcxEngine::expose(const std::string& peer, AttemptId attempt, std::shared_ptr<const Plan> plan, Duration lease) {
  const auto link = require_link(peer);
  plan->check_bounds(Side::source, local_->lengths);
  const std::lock_guard lock(link->mutex);
  if (link->state != PeerLink::State::up) throw std::runtime_error("peer " + peer + " is not connected");
  ExposureSpec spec{.peer = peer, .attempt = attempt, .plan = std::move(plan), .regions = local_->data,
                    .keep = {local_}, .lease = lease};
  if (!core_->exposures.expose(std::move(spec), Clock::now())) {
    throw std::runtime_error("attempt " + std::to_string(attempt) + " is exposed to " + peer + " already");
  }
  behind_->commands().push(command::LeaseBegan{});
}

LeaseAnswer UcxEngine::lease(const std::string& peer, AttemptId attempt) {
  return core_->exposures.lease(peer, attempt, Clock::now());
}

LeaseAnswer UcxEngine::withdraw(const std::string& peer, AttemptId attempt) {
  return core_->exposures.withdraw(peer, attempt, Clock::now());
}

// --- target side ----------------------------------------------------------------------------------------------------

std::uint64_t UcxEngine::read(ReadSpec spec) {
  const auto link = require_link(spec.peer);
  spec.plan->check_bounds(Side::target, local_->lengths);
  const std::lock_guard lock(link->mutex);
  if (link->state != PeerLink::State::up) throw std::runtime_error("peer " + spec.peer + " is not connected");
  spec.plan->check_bounds(Side::source, link->remote->lengths);
  if (core_->active_reads >= core_->settings.max_reads) {
    throw EngineFull(std::to_string(core_->settings.max_reads) + " reads are under way");
  }
  core_->active_reads += 1;
  spec.op = ++last_op_;
  spec.regions = local_->data;
  behind_->commands().push(
      command::StartRead{std::make_unique<UcxRead>(std::move(spec), local_, link->remote)});
  return last_op_;
}

std::uint64_t UcxEngine::cut_off(const std::string& peer, AttemptId attempt) {
  require_open();
  behind_->commands().push(command::CutOff{++last_op_, peer, attempt});
  return last_op_;
}

}  // namespace kvlink
