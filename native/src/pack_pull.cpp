#include "pack_pull.hpp"

#include <algorithm>
#include <exception>
#include <utility>

namespace kvlink {

void Pulling::open(std::size_t slots) {
  for (std::size_t slot = slots; slot-- > 0;) slots_free_.push_back(slot);
}

bool Pulling::ask(Channel& channel) {
  bool any = false;
  while (!slots_free_.empty() && demand_.any() && turns_.may_ask()) {
    auto next = demand_.take(asked_.size());
    if (!next) break;
    turns_.asked(next->stretch.end - next->stretch.begin);
    Pull& pull = pulls_.emplace_back(Pull{.read = std::move(next->read), .stretch = next->stretch});
    pull.at = std::prev(pulls_.end());
    pull.slot = slots_free_.back();
    slots_free_.pop_back();
    asked_.push_back(&pull);
    const ReadSpec& spec = pull.read->spec();
    channel.pack({spec.attempt, pull.stretch.begin, pull.stretch.end, *pull.slot, spec.integrity});
    any = true;
  }
  return any;
}

void Pulling::packed(const PackAnswer& answer) {
  if (asked_.empty()) throw ProtocolViolation("packed bytes that nobody asked for");
  Pull& pull = *asked_.front();
  const std::size_t digests = answer.reason == 0 ? pull.leaves() : 0;
  if (answer.attempt != pull.read->spec().attempt || answer.begin != pull.stretch.begin || answer.slot != *pull.slot ||
      answer.digests.size() != digests) {
    throw ProtocolViolation("packed bytes of attempt " + std::to_string(answer.attempt) + " that answer another ask");
  }
  asked_.pop_front();
  if (answer.reason != 0) {
    pull.read->stop(Outcome::source_failed, text(static_cast<FailReason>(answer.reason)));
    return finish(pull);
  }
  std::copy(answer.digests.begin(), answer.digests.end(), pull.theirs.begin());
  if (!pull.read->enter()) return finish(pull);
  fetch(pull);
}

void Pulling::fetched(Pull& pull, const std::byte* bytes, bool keeps_slot) {
  pull.bytes = bytes;
  if (!keeps_slot) free_slot(pull);
  scattering_.push_back(&pull);
}

void Pulling::failed(Pull& pull) {
  pull.read->exit();
  finish(pull);
}

bool Pulling::step() {
  for (std::size_t i = 0; i < scattering_.size();) {
    Pull& pull = *scattering_[i];
    const Time began = Clock::now();
    try {
      const auto step = advance(pull);
      pull.busy += Clock::now() - began;
      if (step == PackJob::Step::ran) return true;
      if (step == PackJob::Step::waiting) {
        ++i;
        continue;
      }
    } catch (const std::exception& error) {
      pull.job.reset();
      pull.read->stop(Outcome::failed, error.what());
    }
    scattering_.erase(scattering_.begin() + static_cast<std::ptrdiff_t>(i));
    land(pull);
    return true;
  }
  return false;
}

// Of a read that was stopped nothing more is begun; what was begun goes to its end.
PackJob::Step Pulling::advance(Pull& pull) {
  if (!pull.job) {
    if (pull.read->stopped()) return PackJob::Step::done;
    const ReadSpec& spec = pull.read->spec();
    pull.job = packer_.scatter({*spec.plan, pull.stretch.begin, pull.stretch.end,
                                std::span(pull.ours).first(pull.leaves())},
                               pull.bytes, spec.regions);
  }
  return pull.job->step();
}

void Pulling::land(Pull& pull) {
  if (pull.job) {
    pull.job.reset();
    const auto digests = pull.leaves();
    const bool again = pull.read->landed(pull.stretch, std::span(pull.theirs).first(digests),
                                         std::span(pull.ours).first(digests), pull.busy);
    if (again) demand_.add(pull.read);
  }
  pull.read->exit();
  release(pull);
  finish(pull);
}

void Pulling::abandon() {
  while (!asked_.empty()) {
    finish(*asked_.front());
    asked_.pop_front();
  }
}

void Pulling::free_slot(Pull& pull) {
  if (pull.slot) slots_free_.push_back(*pull.slot);
  pull.slot.reset();
}

void Pulling::finish(Pull& pull) {
  free_slot(pull);
  pulls_.erase(pull.at);
}

}  // namespace kvlink
