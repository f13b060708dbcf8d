#include "pack_serve.hpp"

#include <utility>

namespace kvlink {

PackServing::PackServing(Exposures& exposures, Packer& packer, std::string peer, Slots ring)
    : exposures_(exposures), packer_(packer), peer_(std::move(peer)), ring_(std::move(ring)), taken_(ring_.count()) {}

void PackServing::accept(const PackAsk& ask) {
  const bool possible = ask.begin >= 0 && ask.begin % kLeafBytes == 0 && ask.begin < ask.end &&
                        ask.end <= kMaxTransferBytes && ask.end - ask.begin <= ring_.slot_bytes();
  if (!possible || ask.slot >= ring_.count()) {
    throw ProtocolViolation("pack of bytes " + std::to_string(ask.begin) + " to " + std::to_string(ask.end) +
                            " into slot " + std::to_string(ask.slot) + " of " + std::to_string(ring_.count()));
  }
  if (taken_[ask.slot]) {
    throw ProtocolViolation("pack into slot " + std::to_string(ask.slot) + ", which is being packed");
  }
  auto found = exposures_.find_held(peer_, ask.attempt, Clock::now());
  auto work = std::make_unique<Work>(Work{.ask = ask, .exposure = std::move(found.exposure)});
  if (!work->exposure) {
    work->reason = static_cast<std::uint32_t>(found.reason);
  } else {
    const std::int64_t total = Exposures::spec_of(*work->exposure).plan->total_bytes();
    if (ask.end > total || (ask.end % kLeafBytes != 0 && ask.end != total)) {
      throw ProtocolViolation("pack of bytes up to " + std::to_string(ask.end) + " of attempt " +
                              std::to_string(ask.attempt) + ", which has " + std::to_string(total));
    }
  }
  taken_[ask.slot] = true;
  works_.push_back(std::move(work));
}

// Answers go out in the order of the asks. While a device is at work on one, the next is begun.
bool PackServing::step(Channel& channel) {
  bool ran = false;
  for (const auto& work : works_) {
    if (work->reason) continue;
    PackJob::Step step;
    try {
      step = advance(*work);
    } catch (const std::exception&) {  // of this attempt only: a device that is lost fails the others in their turn
      end(*work, static_cast<std::uint32_t>(FailReason::not_packed));
      step = PackJob::Step::done;
    }
    ran = step != PackJob::Step::waiting;
    if (ran) break;
  }
  while (!works_.empty() && works_.front()->reason) {
    Work& work = *works_.front();
    taken_[work.ask.slot] = false;
    channel.packed({work.ask.attempt, work.ask.begin, work.ask.slot, *work.reason,
                    *work.reason == 0 ? work.leaves() : std::span<std::uint64_t>()});
    works_.pop_front();
  }
  return ran;
}

PackJob::Step PackServing::advance(Work& work) {
  if (!work.look) {
    const FailReason reason = look(work);
    if (!work.look) {
      end(work, static_cast<std::uint32_t>(reason));
      return PackJob::Step::done;
    }
  }
  if (!work.job) {
    const ExposureSpec& spec = Exposures::spec_of(*work.exposure);
    work.job = packer_.gather({*spec.plan, work.ask.begin, work.ask.end, work.leaves()}, spec.regions,
                              ring_.at(work.ask.slot));
  }
  const auto step = work.job->step();
  if (step == PackJob::Step::waiting) return step;
  if (step == PackJob::Step::done) {
    if (work.ask.digests) {
      exposures_.record(*work.exposure, static_cast<std::size_t>(work.ask.begin / kLeafBytes), work.leaves());
    }
    end(work, 0);
  } else {
    work.look.reset();  // withdraw() need not wait for the next piece
  }
  return step;
}

// A thread must not take a shared lock twice, so a look that a device keeps open serves the next work, too.
FailReason PackServing::look(Work& work) {
  for (const auto& other : works_) {
    if (!other->look || other->exposure != work.exposure) continue;
    const auto found = exposures_.find_held(peer_, work.ask.attempt, Clock::now());
    if (found.exposure == work.exposure) work.look = other->look;
    return found.reason;
  }
  auto taken = exposures_.look(*work.exposure, Clock::now());
  const FailReason reason = taken.reason;
  if (taken) work.look = std::make_shared<Exposures::Look>(std::move(taken));
  return reason;
}

void PackServing::end(Work& work, std::uint32_t reason) {
  work.reason = reason;
  work.job.reset();
  work.look.reset();
  work.exposure.reset();
}

}  // namespace kvlink
