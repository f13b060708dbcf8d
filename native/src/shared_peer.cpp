#include "shared_peer.hpp"

#include <errno.h>
#include <sys/epoll.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace kvlink {
namespace {

// A read that is over sooner than a helper is awake is left to this thread.
constexpr std::int64_t kHelpFromBytes = 1024 * 1024;

void add(std::deque<std::shared_ptr<SharedRead>>& reads, std::shared_ptr<SharedRead> read) {
  if (std::find(reads.begin(), reads.end(), read) == reads.end()) reads.push_back(std::move(read));
}

}  // namespace

SharedCore::SharedCore(const EngineLimits& bounds) : EngineCore(bounds), lanes(epoll_create1(EPOLL_CLOEXEC)) {
  if (!lanes) throw std::system_error(errno, std::generic_category(), "epoll");
}

SharedPeer::SharedPeer(SharedCore& core, std::string name, std::unique_ptr<Channel> channel,
                       std::unique_ptr<SharedLane> lane)
    : Peer(core, std::move(name), std::move(channel)), core_(core), lane_(std::move(lane)), turns_(core.pace) {
  epoll_event event{.events = EPOLLIN, .data = {.ptr = this}};
  if (epoll_ctl(core_.lanes.fd(), EPOLL_CTL_ADD, lane_->fd(), &event) < 0) {
    throw std::system_error(errno, std::generic_category(), "lane cannot be waited for");
  }
}

SharedPeer::~SharedPeer() { forget_lane(); }

// By name, not by closing: a forked child may hold the socket open, and epoll would go on telling of it.
void SharedPeer::forget_lane() {
  if (lane_) epoll_ctl(core_.lanes.fd(), EPOLL_CTL_DEL, lane_->fd(), nullptr);
  lane_.reset();
}

// The reads are stopped. What they have mapped goes with the last of them, when no helper is inside any more; what none
// reads is unmapped here and now.
void SharedPeer::on_leaving() {
  forget_lane();
  undecided_.clear();
  copying_.clear();
  asking_for_.clear();
  asking_.reset();
  serving_.reset();
  mapping_.reset();
  process_.reset();
  finding_.clear();
  for (const auto& region : mapped_) region->memory.reset();
  mapped_.clear();
}

// --- the lane -------------------------------------------------------------------------------------------------------

void SharedPeer::hear() {
  if (!lane_) return;
  try {
    while (const auto telling = lane_->receive()) on(*telling);
    if (lane_->has_file()) throw ProtocolViolation("files on the lane that belong to no frame");
    decide();
  } catch (const std::exception& error) {
    lose(error.what());
  }
}

void SharedPeer::on(const Telling& telling) {
  switch (telling.tell) {
    case Tell::bell: return;
    case Tell::map: return give_region(telling.region);
    case Tell::region: return take_region(telling);
    case Tell::want_ring: return give_ring();
    case Tell::ring: return take_ring();
    case Tell::want_proof: return give_proof();
    case Tell::proof: return take_proof(telling);
    case Tell::find: return give_place(telling.region);
    case Tell::found: return take_place(telling);
  }
  throw ProtocolViolation("unknown frame " + std::to_string(static_cast<std::uint32_t>(telling.tell)) + " on the lane");
}

OwnRegion SharedPeer::own_region(std::uint32_t region) {
  const std::lock_guard lock(core_.mutex);
  const auto found = core_.regions.find(region);
  return found == core_.regions.end() ? OwnRegion{} : found->second;
}

void SharedPeer::give_region(std::uint32_t region) {
  const auto backing = own_region(region).backing;
  Telling answer{.tell = Tell::region, .region = region};
  if (!backing) return lane_->send(answer);
  answer.offset = backing->offset;
  answer.bytes = backing->bytes;
  lane_->send(answer, {backing->descriptor.fd()});
}

void SharedPeer::take_region(const Telling& telling) {
  if (!mapping_ || telling.region != mapping_number_) throw ProtocolViolation("a region that nobody asked for");
  const auto region = std::exchange(mapping_, nullptr);
  if (telling.bytes == 0) {
    region->refused = true;
    return;
  }
  const Descriptor file = lane_->take_file();
  if (telling.bytes < region->bytes) throw ProtocolViolation("a region smaller than its key");
  try {
    region->memory = std::make_unique<const PeerMemory>(file, telling.offset, region->bytes);
    mapped_.push_back(region);
  } catch (const std::system_error&) {
    region->refused = true;  // by this machine: the ring needs no such room
  }
}

void SharedPeer::give_proof() {
  if (!core_.nonce) core_.nonce.emplace();
  lane_->send({.tell = Tell::proof, .offset = core_.nonce->address(), .bytes = core_.nonce->value()});
}

void SharedPeer::take_proof(const Telling& telling) {
  if (!process_ || process_->proven() || !process_->refusal().empty()) {
    throw ProtocolViolation("a proof that nobody wanted");
  }
  process_->prove(telling.offset, telling.bytes);
}

// An address is told to those alone who ask on the lane. It is of use only to a process that the kernel lets read ours,
// which could find it without us.
void SharedPeer::give_place(std::uint32_t region) {
  const OwnRegion own = own_region(region);
  lane_->send({.tell = Tell::found, .region = region, .offset = own.address, .bytes = own.bytes});
}

void SharedPeer::take_place(const Telling& telling) {
  const auto asked = finding_.find(telling.region);
  if (asked == finding_.end()) throw ProtocolViolation("a place that nobody asked for");
  const auto region = std::move(asked->second);
  finding_.erase(asked);
  if (telling.bytes == 0) {
    region->nowhere = true;
    return;
  }
  if (telling.bytes < region->bytes) throw ProtocolViolation("a region smaller than its key");
  if (telling.offset == 0 || telling.offset + telling.bytes < telling.offset) {
    throw ProtocolViolation("a region that no memory could hold");
  }
  region->address = telling.offset;
}

void SharedPeer::give_ring() {
  if (serving_) throw ProtocolViolation("a second ring wanted");
  serving_.emplace(core_.exposures, *core_.packer, name(), lane_->take_file());
  lane_->send({.tell = Tell::ring}, {serving_->page_fd(), serving_->ring_fd()});
}

void SharedPeer::take_ring() {
  if (!asking_) throw ProtocolViolation("a ring that nobody wanted");
  const Descriptor answers = lane_->take_file();
  const Descriptor ring = lane_->take_file();
  asking_->meet(answers, ring);
}

// --- how a read's bytes come ----------------------------------------------------------------------------------------

void SharedPeer::begin(ActiveRead& read) {
  const auto started = std::static_pointer_cast<SharedRead>(reads_.back());
  if (static_cast<SharedRead&>(read).left() == 0) return;
  undecided_.push_back(started);
  try {
    decide();
  } catch (const std::exception& error) {
    lose(error.what());
  }
}

void SharedPeer::ended(ActiveRead& read) {
  const auto is_it = [&read](const auto& other) { return other.get() == &read; };
  for (auto* reads : {&undecided_, &copying_, &asking_for_}) std::erase_if(*reads, is_it);
}

// Starts those reads for which all is there, and asks for what is missing. Asks nothing twice.
void SharedPeer::decide() {
  while (lane_ && !undecided_.empty()) {
    const Way way = way_of(*undecided_.front());
    if (way == Way::unknown) return;
    auto read = std::move(undecided_.front());
    undecided_.pop_front();
    start(std::move(read), way);
  }
}

SharedPeer::Way SharedPeer::way_of(SharedRead& read) {
  if (read.spec().packed) return by_ring(read, "");
  for (const std::size_t number : read.source_regions()) {
    const SharedRegion& region = read.source_region(number);
    if (!region.mappable) return by_pull(read, "");
    if (region.refused) return by_pull(read, "this process could not map region " + std::to_string(number));
  }
  return by_map(read);
}

SharedPeer::Way SharedPeer::by_map(SharedRead& read) {
  for (const std::size_t number : read.source_regions()) {
    if (read.source_region(number).memory) continue;
    if (!mapping_) {
      mapping_ = read.hold_source_region(number);
      mapping_number_ = static_cast<std::uint32_t>(number);
      lane_->send({.tell = Tell::map, .region = mapping_number_});
    }
    return Way::unknown;
  }
  if (read.spec().integrity && !may_ask()) return Way::unknown;  // for digests
  read.say("mapped", "the source shares all of the memory that is read");
  return Way::mapped;
}

SharedPeer::Way SharedPeer::by_pull(SharedRead& read, std::string why) {
  const bool proven = may_pull();
  if (auto refusal = process_->refusal(); !refusal.empty()) return by_ring(read, std::move(refusal));
  if (!proven) return Way::unknown;
  bool all = true;
  for (const std::size_t number : read.source_regions()) {
    const SharedRegion& region = read.source_region(number);
    if (region.nowhere) return by_ring(read, "the source does not tell where region " + std::to_string(number) + " is");
    if (region.address != 0) continue;
    all = false;
    const auto told = static_cast<std::uint32_t>(number);
    if (finding_.try_emplace(told, read.hold_source_region(number)).second) {
      lane_->send({.tell = Tell::find, .region = told});
    }
  }
  if (!all || (read.spec().integrity && !may_ask())) return Way::unknown;
  read.say("pulled", std::move(why));
  return Way::pulled;
}

SharedPeer::Way SharedPeer::by_ring(SharedRead& read, std::string why) {
  read.say("ring", std::move(why));
  return may_ask() ? Way::ring : Way::unknown;
}

bool SharedPeer::may_pull() {
  if (process_) return process_->proven();
  process_ = std::make_shared<PeerProcess>(lane_->fd());
  if (process_->refusal().empty()) lane_->send({.tell = Tell::want_proof});
  return false;
}

bool SharedPeer::may_ask() {
  if (asking_) return asking_->met();
  asking_.emplace(*core_.packer);
  lane_->send({.tell = Tell::want_ring}, {asking_->page_fd()});
  return false;
}

void SharedPeer::start(std::shared_ptr<SharedRead> read, Way way) {
  if (read->stopped()) return;
  if (way == Way::mapped) read->mapped();
  if (way == Way::pulled) read->pulled(process_);
  if (way == Way::ring || read->spec().integrity) return asking_for_.push_back(std::move(read));
  if (!core_.pace && read->spec().plan->total_bytes() >= kHelpFromBytes) core_.copiers->offer(read);
  copying_.push_back(std::move(read));
}

// --- moving ---------------------------------------------------------------------------------------------------------

SharedPeer::Step SharedPeer::step() {
  Step step;
  try {
    if (!leaving()) step_all(step);
  } catch (const std::exception& error) {
    lose(error.what());
    step.over = true;
  }
  return step;
}

// What others wait for comes first.
void SharedPeer::step_all(Step& step) {
  if (serving_) serve(step);
  if (asking_ && asking_->met()) {
    land(step);
    ask();
  }
  if (!copying_.empty()) copy(step);
}

void SharedPeer::serve(Step& step) {
  const auto served = serving_->step();
  step.any |= served.ran;
  if (served.wake) lane_->ring();
}

void SharedPeer::land(Step& step) {
  const auto landed = asking_->step();
  step.any |= landed.ran;
  if (!landed.read) return;
  step.over |= landed.read->over();
  if (landed.again) add(asking_for_, landed.read);
}

// Reads take turns, stretch by stretch.
void SharedPeer::ask() {
  bool any = false;
  while (!asking_for_.empty() && asking_->has_room(*asking_for_.front()) && turns_.may_ask()) {
    auto read = std::move(asking_for_.front());
    asking_for_.pop_front();
    const auto stretch = read->take();
    if (!stretch) continue;
    turns_.asked(stretch->end - stretch->begin);
    asking_->ask(read, *stretch);
    any = true;
    if (read->left() > 0) asking_for_.push_back(std::move(read));
  }
  if (any && asking_->publish()) lane_->ring();
}

// Reads take turns here, too; helpers take from the same reads.
void SharedPeer::copy(Step& step) {
  if (!turns_.may_ask()) return;
  auto read = std::move(copying_.front());
  copying_.pop_front();
  const auto copied = read->copy_some();
  turns_.asked(copied.bytes);
  step.any |= copied.bytes > 0;
  step.over |= copied.over;
  if (read->left() > 0) copying_.push_back(std::move(read));
}

bool SharedPeer::prepare() {
  return std::any_of(mapped_.begin(), mapped_.end(), [](const auto& region) { return region->memory->touch_some(); });
}

// --- sleep ----------------------------------------------------------------------------------------------------------

bool SharedPeer::doze() {
  if (asking_) asking_->words().doze();
  if (serving_) serving_->words().doze();
  return !news();
}

void SharedPeer::wake() {
  if (asking_) asking_->words().wake();
  if (serving_) serving_->words().wake();
}

bool SharedPeer::peer_is_on_this_cpu() const {
  return (asking_ && asking_->waiting() && asking_->words().peer_is_on_this_cpu()) ||
         (serving_ && serving_->words().peer_is_on_this_cpu());
}

bool SharedPeer::peer_is_awake() const {
  return (asking_ && asking_->met() && !asking_->words().peer_is_asleep()) ||
         (serving_ && !serving_->words().peer_is_asleep());
}

}  // namespace kvlink
