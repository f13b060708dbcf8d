#include "shared_ring.hpp"

#include <sched.h>

#include <exception>
#include <new>
#include <utility>

#include "carry.hpp"

namespace kvlink {
namespace {

template <typename Page>
Page& make_in(const SharedMemory& memory) {
  return *new (memory.data()) Page();
}

template <typename Page>
Page& page_in(const SharedMemory& memory) {
  return *std::launder(reinterpret_cast<Page*>(memory.data()));
}

template <typename Page>
const Page& page_in(const PeerMemory& memory) {
  return *reinterpret_cast<const Page*>(memory.data());
}

}  // namespace

// --- words ----------------------------------------------------------------------------------------------------------

// Either the peer sees the count before it sleeps, or we see that it sleeps: all four are sequentially consistent.
bool WordPair::publish(std::uint32_t count) {
  ours_.cpu.store(static_cast<std::uint32_t>(sched_getcpu()), std::memory_order_relaxed);
  ours_.published.store(count, std::memory_order_seq_cst);
  return theirs_->asleep.load(std::memory_order_seq_cst) != 0;
}

std::uint32_t WordPair::published_by_peer() const { return theirs_->published.load(std::memory_order_seq_cst); }

bool WordPair::peer_is_on_this_cpu() const {
  return theirs_->cpu.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(sched_getcpu());
}

bool WordPair::peer_is_asleep() const { return theirs_->asleep.load(std::memory_order_relaxed) != 0; }

// --- the target -----------------------------------------------------------------------------------------------------

RingAsking::RingAsking(Packer& packer)
    : packer_(packer),
      page_("kvlink-asks", sizeof(AskPage)),
      words_(make_in<AskPage>(page_).words) {}

RingAsking::~RingAsking() {
  if (!landing_) return;
  landing_->job.reset();
  slots_[landed_ % kRingSlots].read->exit();
}

void RingAsking::meet(const Descriptor& answers, const Descriptor& ring) {
  if (met()) throw ProtocolViolation("a second ring");
  answers_ = std::make_unique<const PeerMemory>(answers, 0, sizeof(AnswerPage));
  ring_ = std::make_unique<const PeerMemory>(ring, 0, kRingBytes);
  words_.meet(page_in<AnswerPage>(*answers_).words);
}

void RingAsking::ask(std::shared_ptr<SharedRead> read, Stretch stretch) {
  AskEntry& entry = page_in<AskPage>(page_).asks[asked_ % kRingSlots];
  entry.attempt.store(read->spec().attempt, std::memory_order_relaxed);
  entry.begin.store(stretch.begin, std::memory_order_relaxed);
  entry.end.store(stretch.end, std::memory_order_relaxed);
  const Want want = read->brings_itself_in() ? Want::digests : read->spec().integrity ? Want::both : Want::bytes;
  entry.want.store(static_cast<std::uint32_t>(want), std::memory_order_relaxed);
  slots_[asked_ % kRingSlots] = {std::move(read), stretch};
  ++asked_;
}

RingStep RingAsking::step() {
  const std::uint32_t answered = words_.published_by_peer() - landed_;
  if (answered > asked_ - landed_) throw ProtocolViolation("answers that nobody asked for");
  if (answered == 0) return {};
  const Slot& slot = slots_[landed_ % kRingSlots];
  if (!landing_ && !begin(slot, landed_ % kRingSlots)) return finish();
  const Time began = Clock::now();
  try {
    const bool ran = bring_in(slot, landed_ % kRingSlots);
    landing_->took += Clock::now() - began;
    if (landing_->job) return {.ran = ran};
  } catch (const std::exception& error) {
    slot.read->stop(Outcome::failed, error.what());
  }
  return finish();
}

// False if a device is at work. The digests are of what was written, whatever the peer does to its memory meanwhile.
bool RingAsking::bring_in(const Slot& slot, std::size_t index) {
  const ReadSpec& spec = slot.read->spec();
  const auto [begin, end] = slot.stretch;
  const auto ours = std::span(landing_->ours).first(landing_->leaves);
  if (slot.read->brings_itself_in()) {
    slot.read->bring_in(slot.stretch, ours);
    return true;
  }
  if (!landing_->job) {
    const std::byte* packed = ring_->data() + index * static_cast<std::size_t>(kRingSlotBytes);
    landing_->job = packer_.scatter({*spec.plan, begin, end, ours}, packed, spec.regions);
  }
  const auto step = landing_->job->step();
  if (step == PackJob::Step::done) landing_->job.reset();
  return step != PackJob::Step::waiting;
}

// False if nothing of the slot is to land. Each word of the answer is read once.
bool RingAsking::begin(const Slot& slot, std::size_t index) {
  const AnswerEntry& answer = page_in<AnswerPage>(*answers_).answers[index];
  if (const auto reason = answer.reason.load(std::memory_order_relaxed); reason != 0) {
    slot.read->stop(Outcome::source_failed, text(static_cast<FailReason>(reason)));
  }
  if (!slot.read->enter()) return false;
  const ReadSpec& spec = slot.read->spec();
  const std::int64_t bytes = slot.stretch.end - slot.stretch.begin;
  landing_.emplace();
  landing_->leaves = spec.integrity ? static_cast<std::size_t>(leaf_count(bytes)) : 0;
  for (std::size_t i = 0; i < landing_->leaves; ++i) {
    landing_->theirs[i] = answer.digests[i].load(std::memory_order_relaxed);
  }
  return true;
}

RingStep RingAsking::finish() {
  auto [read, stretch] = std::exchange(slots_[landed_++ % kRingSlots], {});
  RingStep end{.ran = true};
  if (landing_) {
    landing_->job.reset();
    if (!read->stopped()) {
      end.again = read->landed(stretch, std::span(landing_->theirs).first(landing_->leaves),
                               std::span(landing_->ours).first(landing_->leaves), landing_->took);
    }
    read->exit();
    landing_.reset();
  }
  end.read = std::move(read);
  return end;
}

// --- the source -----------------------------------------------------------------------------------------------------

RingServing::RingServing(Exposures& exposures, Packer& packer, std::string peer, const Descriptor& asks)
    : exposures_(exposures),
      packer_(packer),
      peer_(std::move(peer)),
      asks_(asks, 0, sizeof(AskPage)),
      page_("kvlink-answers", sizeof(AnswerPage)),
      ring_("kvlink-ring", kRingBytes),
      words_(make_in<AnswerPage>(page_).words) {
  words_.meet(page_in<AskPage>(asks_).words);
}

RingStep RingServing::step() {
  const std::uint32_t asked = words_.published_by_peer() - served_;
  if (asked > kRingSlots) throw ProtocolViolation("more asks than there are slots");
  if (asked == 0) return {};
  if (!work_) begin();
  Work& work = *work_;
  if (!work.exposure) {
    if (const auto reason = open(work)) return answer(static_cast<std::uint32_t>(*reason));
  }
  if (work.job) {
    try {
      const auto step = work.job->step();
      if (step != PackJob::Step::done) return {.ran = step == PackJob::Step::ran};
    } catch (const std::exception&) {
      return answer(static_cast<std::uint32_t>(FailReason::withdrawn));  // what the device left is nobody's
    }
  } else {
    const ExposureSpec& spec = Exposures::spec_of(*work.exposure);
    digest_leaves(*spec.plan, Side::source, spec.regions, work.begin / kLeafBytes, work.leaves());
  }
  if (wants(work.want, Want::digests)) {
    exposures_.record(*work.exposure, static_cast<std::size_t>(work.begin / kLeafBytes), work.leaves());
  }
  return answer(0);
}

void RingServing::begin() {
  const AskEntry& ask = page_in<AskPage>(asks_).asks[slot()];
  const auto want = ask.want.load(std::memory_order_relaxed);
  work_.emplace(Work{.attempt = ask.attempt.load(std::memory_order_relaxed),
                     .begin = ask.begin.load(std::memory_order_relaxed),
                     .end = ask.end.load(std::memory_order_relaxed),
                     .want = static_cast<Want>(want)});
  const Work& work = *work_;
  if (want < 1 || want > 3 || work.begin < 0 || work.begin % kLeafBytes != 0 || work.begin >= work.end ||
      work.end > kMaxTransferBytes || work.end - work.begin > kRingSlotBytes) {
    throw ProtocolViolation("ask for bytes " + std::to_string(work.begin) + " to " + std::to_string(work.end));
  }
}

// Why the ask cannot be served, if it cannot.
std::optional<FailReason> RingServing::open(Work& work) {
  const Time now = Clock::now();
  auto found = exposures_.find_held(peer_, work.attempt, now);
  if (!found.exposure) return found.reason;
  const ExposureSpec& spec = Exposures::spec_of(*found.exposure);
  const std::int64_t total = spec.plan->total_bytes();
  if (work.end > total || (work.end % kLeafBytes != 0 && work.end != total)) {
    throw ProtocolViolation("ask for bytes up to " + std::to_string(work.end) + " of attempt " +
                            std::to_string(work.attempt) + ", which has " + std::to_string(total));
  }
  work.exposure = std::move(found.exposure);
  work.look = exposures_.look(*work.exposure, now);
  if (!work.look) return work.look.reason;
  if (!wants(work.want, Want::bytes)) return std::nullopt;
  work.job = packer_.gather({*spec.plan, work.begin, work.end, work.leaves()}, spec.regions,
                            ring_.data() + slot() * static_cast<std::size_t>(kRingSlotBytes));
  return std::nullopt;
}

RingStep RingServing::answer(std::uint32_t reason) {
  AnswerEntry& entry = page_in<AnswerPage>(page_).answers[slot()];
  const auto leaves = work_->leaves();
  for (std::size_t i = 0; i < leaves.size(); ++i) entry.digests[i].store(leaves[i], std::memory_order_relaxed);
  entry.reason.store(reason, std::memory_order_relaxed);
  work_.reset();
  return {.ran = true, .wake = words_.publish(++served_)};
}

}  // namespace kvlink
