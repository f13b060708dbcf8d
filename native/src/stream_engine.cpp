#include "stream_engine.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "threads.hpp"

namespace kvlink {
namespace {

using namespace std::chrono_literals;

// Moving goes on this long before commands, channels and timers are looked at again.
constexpr Duration kMoveSlice = 500us;

}  // namespace

// --- peers ----------------------------------------------------------------------------------------------------------

StreamPeer::StreamPeer(StreamCore& core, std::string name, std::unique_ptr<Channel> channel,
                       std::vector<std::shared_ptr<Lane>> lanes)
    : Peer(core, std::move(name), std::move(channel)),
      core_(core),
      lanes_(std::move(lanes)),
      demand_(std::make_shared<Demand>(lanes_.size())) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i]->join(Peer::name(), core_.exposures, demand_, core_.pace);
    core_.movers[i]->add(lanes_[i]);
  }
}

bool StreamPeer::over() const {
  return Peer::over() && std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->closed(); });
}

// A read of one ask needs one lane: the first, which this thread steps itself, unless others are at work already.
void StreamPeer::begin(ActiveRead& started) {
  const auto read = std::static_pointer_cast<AskedRead>(reads_.back());
  const std::size_t asks = static_cast<AskedRead&>(started).left();
  if (asks == 0) return;
  demand_->add(read);
  if (reads_.size() == 1) next_lane_ = 0;
  for (std::size_t i = 0; i < std::min(asks, lanes_.size()); ++i) {
    core_.movers[next_lane_]->poke(lanes_[next_lane_]);
    next_lane_ = (next_lane_ + 1) % lanes_.size();
  }
}

void StreamPeer::on_leaving() {
  for (std::size_t i = 0; i < lanes_.size(); ++i) core_.movers[i]->drop(lanes_[i]);
}

// --- the thread -----------------------------------------------------------------------------------------------------

StreamThread::StreamThread(std::shared_ptr<StreamCore> core, std::size_t movers)
    : EngineThread(core), core_(std::move(core)) {
  for (std::size_t i = 0; i < movers; ++i) {
    core_->movers.push_back(std::make_unique<Mover>(Mover::Reports{
        .read_over = [this] { commands().push(command::Nudge{}); },
        .lane_lost = [this](const std::string& peer,
                            std::string detail) { commands().push(command::Lose{peer, std::move(detail)}); }}));
  }
  wake_on(core_->movers.front()->fd());
}

bool StreamThread::move() {
  for (const Time end = Clock::now() + kMoveSlice;;) {
    const bool more = core_->movers.front()->turn(0);
    if (!more || Clock::now() >= end) return more;
  }
}

// --- the calls ------------------------------------------------------------------------------------------------------

StreamEngine::StreamEngine(const EngineLimits& limits, std::size_t lanes)
    : StreamEngine(limits, lanes, std::make_shared<StreamCore>(limits)) {}

StreamEngine::StreamEngine(const EngineLimits&, std::size_t lanes, std::shared_ptr<StreamCore> core)
    : Engine("kvlink-stream", core, std::make_unique<StreamThread>(core, lanes)), core_(std::move(core)) {
  for (std::size_t i = 1; i < lanes; ++i) {
    threads_.push_back(start_without_signals("kvlink-lane", [mover = core_->movers[i].get()] { mover->run(); }));
  }
}

StreamEngine::~StreamEngine() { close(); }

void StreamEngine::keep_to(const std::vector<int>& cpus) {
  Engine::keep_to(cpus);
  for (std::thread& thread : threads_) keep_to_cpus(thread, cpus);
}

void StreamEngine::closed() {
  for (std::size_t i = 1; i < core_->movers.size(); ++i) core_->movers[i]->stop();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void StreamEngine::let_go_own() { new std::vector<std::thread>(std::move(threads_)); }

std::shared_ptr<const void> StreamEngine::hold(std::uint64_t, std::uint64_t) { return nullptr; }

void StreamEngine::import_region(const std::string& peer, std::size_t region, std::uint64_t length) {
  learn_region(peer, region, length, nullptr);
}

std::uint64_t StreamEngine::connect(const std::string& peer, int channel_fd, const std::vector<int>& lane_fds) {
  auto channel = std::make_unique<Channel>(channel_fd);
  std::vector<std::shared_ptr<Lane>> lanes;
  std::string refusal;
  for (const int fd : lane_fds) {  // all of them, so that none stays open
    try {
      lanes.push_back(std::make_shared<Lane>(fd));
    } catch (const std::runtime_error& error) {
      refusal = error.what();
    }
  }
  if (!refusal.empty()) throw std::runtime_error(refusal);
  if (lanes.empty() || lanes.size() > core_->movers.size()) {
    throw std::invalid_argument(std::to_string(lanes.size()) + " lanes; a peer has 1 to " +
                                std::to_string(core_->movers.size()));
  }
  return Engine::connect(peer, std::move(channel),
                         [core = core_, peer, lanes = std::move(lanes)](std::unique_ptr<Channel> authenticated) {
                           return std::make_unique<StreamPeer>(*core, peer, std::move(authenticated), lanes);
                         });
}

std::shared_ptr<ActiveRead> StreamEngine::make_read(ReadSpec spec, std::shared_ptr<const LocalRegions> to,
                                                    std::shared_ptr<const RemoteRegions>) {
  return std::make_shared<AskedRead>(std::move(spec), std::move(to), core_->movers.size());
}

}  // namespace kvlink
