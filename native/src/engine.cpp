#include "engine.hpp"

#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "digest.hpp"
#include "threads.hpp"

namespace kvlink {
namespace {

std::size_t checked(std::size_t region) {
  if (region >= static_cast<std::size_t>(kMaxRegions)) {
    throw std::invalid_argument("region " + std::to_string(region) + " is not below " + std::to_string(kMaxRegions));
  }
  return region;
}

// A region's entry in the parallel tables of a snapshot, which grow with the number.
template <typename T>
T& at(std::vector<T>& table, std::size_t region) {
  if (region >= table.size()) table.resize(region + 1);
  return table[region];
}

}  // namespace

Engine::Engine(const char* name, std::shared_ptr<EngineCore> core, std::unique_ptr<EngineThread> behind)
    : name_(name),
      core_(std::move(core)),
      behind_(std::move(behind)),
      thread_(start_without_signals(name_, [thread = behind_.get()] { thread->run(); })),
      pid_(getpid()) {}

bool Engine::close() {
  if (!std::exchange(closed_, true)) {
    if (getpid() != pid_) {
      let_go();
      return true;
    }
    behind_->commands().push(command::Close{});
    thread_.join();
    closed();
    local_ = std::make_shared<LocalRegions>();
    links_.clear();
  }
  return behind_ == nullptr || !behind_->abandoned();
}

// Leaks, on purpose: what a fork copied must not be torn down from the copy.
void Engine::let_go() {
  let_go_own();
  new std::thread(std::move(thread_));
  new std::shared_ptr<EngineCore>(core_);
  new std::shared_ptr<const LocalRegions>(local_);
  [[maybe_unused]] auto* leaked = behind_.release();
}

void Engine::keep_to(const std::vector<int>& cpus) {
  require_open();
  keep_to_cpus(thread_, cpus);
}

void Engine::require_open() const {
  if (closed_) throw std::runtime_error("this transport is closed");
}

// --- regions --------------------------------------------------------------------------------------------------------

void Engine::register_region(std::size_t region, std::uint64_t address, std::uint64_t length) {
  require_open();
  checked(region);
  if (length == 0 || length > static_cast<std::uint64_t>(kMaxOffsetBytes) || address + length < address) {
    throw std::invalid_argument("a region of " + std::to_string(length) + " bytes cannot be registered");
  }
  auto next = std::make_shared<LocalRegions>(*local_);
  auto& data = at(next->data, region);
  if (data != nullptr) throw std::invalid_argument("region " + std::to_string(region) + " is registered already");
  at(next->held, region) = hold(address, length);
  at(next->lengths, region) = static_cast<std::int64_t>(length);
  data = reinterpret_cast<std::byte*>(address);
  local_ = std::move(next);
}

void Engine::unregister_region(std::size_t region) {
  static_cast<void>(held(region));
  auto next = std::make_shared<LocalRegions>(*local_);
  next->held[region] = nullptr;
  next->data[region] = nullptr;
  next->lengths[region] = 0;
  local_ = std::move(next);
}

std::shared_ptr<const void> Engine::held(std::size_t region) const {
  require_open();
  if (region >= local_->data.size() || local_->data[region] == nullptr) {
    throw std::invalid_argument("region " + std::to_string(region) + " is not registered");
  }
  return local_->held[region];
}

std::uint64_t Engine::length_of(std::size_t region) const {
  static_cast<void>(held(region));
  return static_cast<std::uint64_t>(local_->lengths[region]);
}

// --- peers ----------------------------------------------------------------------------------------------------------

std::uint64_t Engine::connect(const std::string& peer, std::unique_ptr<Channel> channel, command::MakePeer make) {
  require_open();
  if (!channel->end().empty()) throw std::runtime_error(channel->end());
  auto& link = links_[peer];
  if (link) {
    const std::lock_guard lock(link->mutex);
    if (link->state != PeerLink::State::gone) throw std::runtime_error("peer " + peer + " is connected already");
  }
  link = std::make_shared<PeerLink>();
  behind_->commands().push(command::Connect{++last_op_, peer, std::move(channel), std::move(make), link});
  return last_op_;
}

std::shared_ptr<PeerLink> Engine::require_link(const std::string& peer) const {
  require_open();
  const auto found = links_.find(peer);
  if (found == links_.end()) throw std::runtime_error("peer " + peer + " is not connected");
  return found->second;
}

void Engine::learn_region(const std::string& peer, std::size_t region, std::uint64_t length,
                          std::shared_ptr<const void> held) {
  const auto link = require_link(peer);
  checked(region);
  if (length > static_cast<std::uint64_t>(kMaxOffsetBytes)) {
    throw std::invalid_argument("peer " + peer + " tells of a region of " + std::to_string(length) + " bytes");
  }
  const std::lock_guard lock(link->mutex);
  if (link->state != PeerLink::State::up) throw std::runtime_error("peer " + peer + " is not connected");
  auto next = std::make_shared<RemoteRegions>(*link->remote);
  at(next->lengths, region) = static_cast<std::int64_t>(length);
  at(next->held, region) = std::move(held);
  link->remote = std::move(next);
}

std::uint64_t Engine::disconnect(const std::string& peer) {
  require_open();
  behind_->commands().push(command::Disconnect{++last_op_, peer});
  return last_op_;
}

// --- source side ----------------------------------------------------------------------------------------------------

void Engine::expose(const std::string& peer, AttemptId attempt, std::shared_ptr<const Plan> plan, Duration lease) {
  const auto link = require_link(peer);
  plan->check_bounds(Side::source, local_->lengths);
  const std::lock_guard lock(link->mutex);
  if (link->state != PeerLink::State::up) throw std::runtime_error("peer " + peer + " is not connected");
  ExposureSpec spec{.peer = peer, .attempt = attempt, .plan = std::move(plan),
                    .regions = {local_->data.begin(), local_->data.end()}, .keep = {local_}, .lease = lease};
  if (!core_->exposures.expose(std::move(spec), Clock::now())) {
    throw std::runtime_error("attempt " + std::to_string(attempt) + " is exposed to " + peer + " already");
  }
  // A longer lease is seen by the timers of the peer's next heartbeat: the thread need not wake for it now.
  if (lease <= core_->limits.heartbeat) behind_->commands().push(command::LeaseBegan{});
}

LeaseAnswer Engine::lease(const std::string& peer, AttemptId attempt) {
  return core_->exposures.lease(peer, attempt, Clock::now());
}

LeaseAnswer Engine::withdraw(const std::string& peer, AttemptId attempt) {
  return core_->exposures.withdraw(peer, attempt, Clock::now());
}

// --- target side ----------------------------------------------------------------------------------------------------

std::uint64_t Engine::read(ReadSpec spec) {
  const auto link = require_link(spec.peer);
  if (spec.plan->converts() && !spec.plan->cuts_no_element()) {
    throw std::invalid_argument("the plan converts elements that leaves cut: put segments of larger elements first");
  }
  spec.plan->check_bounds(Side::target, local_->lengths);
  const std::lock_guard lock(link->mutex);
  if (link->state != PeerLink::State::up) throw std::runtime_error("peer " + spec.peer + " is not connected");
  spec.plan->check_bounds(Side::source, link->remote->lengths);
  if (core_->active_reads >= core_->limits.max_reads) {
    throw EngineFull(std::to_string(core_->limits.max_reads) + " reads are under way");
  }
  spec.op = last_op_ + 1;
  spec.regions = local_->data;
  if (core_->pace) {
    spec.max_ask_bytes = core_->pace->max_ask_bytes();
    spec.chunk_leaves = std::min(spec.chunk_leaves, static_cast<std::uint32_t>(spec.max_ask_bytes / kLeafBytes));
  }
  auto read = make_read(std::move(spec), local_, link->remote);
  core_->active_reads += 1;
  behind_->commands().push(command::StartRead{std::move(read)});
  return ++last_op_;
}

std::uint64_t Engine::cut_off(const std::string& peer, AttemptId attempt) {
  require_open();
  behind_->commands().push(command::CutOff{++last_op_, peer, attempt});
  return last_op_;
}

void Engine::forget(const std::string& peer, AttemptId attempt) {
  require_open();
  behind_->commands().push_unhurried(command::Forget{peer, attempt});
}

}  // namespace kvlink
