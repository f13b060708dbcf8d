#include "ucx_engine.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvlink {
namespace {

using namespace std::chrono_literals;

// Moving goes on this long before commands, channels and timers are looked at again.
constexpr Duration kMoveSlice = 500us;

std::shared_ptr<UcxCore> open_core(UcxSettings settings) {
  auto context = std::make_shared<UcxContext>(UcxApi::load(settings.libucp), settings.tls);
  return std::make_shared<UcxCore>(std::move(settings), std::move(context));
}

}  // namespace

// --- the thread -----------------------------------------------------------------------------------------------------

UcxThread::UcxThread(std::shared_ptr<UcxCore> core) : EngineThread(core), core_(std::move(core)) {
  wake_on(core_->context->getting().event_fd());
  wake_on(core_->context->serving().event_fd());
  if (core_->packer->fd() >= 0) wake_on(core_->packer->fd());
}

bool UcxThread::move() {
  readers_.clear();
  bool any = false;
  each_peer([this](Peer& peer) {
    if (peer.reading()) readers_.push_back(static_cast<UcxPeer*>(&peer));
  });
  for (const Time end = Clock::now() + kMoveSlice;;) {
    bool more = false;
    for (UcxPeer* peer : readers_) more |= peer->post();
    more |= core_->context->getting().progress();
    more |= core_->context->serving().progress();
    for (UcxPeer* peer : readers_) more |= peer->verify();
    any |= more;
    if (!more || Clock::now() >= end) break;
  }
  each_peer([&any](Peer& peer) {
    any |= static_cast<UcxPeer&>(peer).digest();
    any |= static_cast<UcxPeer&>(peer).pack();
  });
  return any;
}

Time UcxThread::wake_by() {
  Time next = Time::max();
  each_peer([&next](Peer& peer) { next = std::min(next, static_cast<UcxPeer&>(peer).put_off_until()); });
  return next;
}

bool UcxThread::may_sleep() { return core_->context->getting().arm() && core_->context->serving().arm(); }

// --- the calls ------------------------------------------------------------------------------------------------------

UcxEngine::UcxEngine(UcxSettings settings) : UcxEngine(open_core(std::move(settings))) {}

UcxEngine::UcxEngine(std::shared_ptr<UcxCore> core)
    : Engine("kvlink-ucx", core, std::make_unique<UcxThread>(core)), core_(std::move(core)) {}

UcxEngine::~UcxEngine() { close(); }

void UcxEngine::closed() {
  if (!behind().abandoned()) core_->let_go_of_ucx();
}

std::shared_ptr<const void> UcxEngine::hold(std::uint64_t address, std::uint64_t length) {
  // A GPU's memory is read by its kernels only: UCX need not know it, and peers get no key.
  if (core_->settings.gpu) return std::make_shared<const RemoteKey>(RemoteKey{0, length, {}});
  return std::make_shared<const UcxRegion>(core_->context, address, length);
}

RemoteKey UcxEngine::export_key(std::size_t region) const {
  if (core_->settings.gpu) return *std::static_pointer_cast<const RemoteKey>(held(region));
  const auto registered = std::static_pointer_cast<const UcxRegion>(held(region));
  return {registered->address(), registered->length(), registered->pack_key()};
}

std::uint64_t UcxEngine::connect(const std::string& peer, Bytes address, int channel_fd) {
  auto channel = std::make_unique<Channel>(channel_fd);  // takes the descriptor over, whatever follows
  return Engine::connect(peer, std::move(channel),
                         [core = core_, peer, address = std::move(address)](std::unique_ptr<Channel> authenticated) {
                           return std::make_unique<UcxPeer>(*core, peer, address, std::move(authenticated));
                         });
}

void UcxEngine::import_key(const std::string& peer, std::size_t region, RemoteKey key) {
  if (key.address + key.length < key.address) {
    throw std::invalid_argument("peer " + peer + " tells of a region of " + std::to_string(key.length) + " bytes");
  }
  const std::uint64_t length = key.length;
  learn_region(peer, region, length, std::make_shared<const RemoteKey>(std::move(key)));
}

std::shared_ptr<ActiveRead> UcxEngine::make_read(ReadSpec spec, std::shared_ptr<const LocalRegions> to,
                                                 std::shared_ptr<const RemoteRegions> from) {
  if (spec.packed) return std::make_shared<UcxPackedRead>(std::move(spec), std::move(to));
  if (spec.plan->converts()) throw std::invalid_argument("gets cannot convert; read this plan by the packed path");
  if (core_->settings.gpu) throw std::invalid_argument("a cache on a GPU is filled by the packed path only");
  return std::make_shared<UcxDirectRead>(std::move(spec), std::move(to), std::move(from));
}

}  // namespace kvlink
