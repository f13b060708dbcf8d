// Source side of packed transfers with one peer: what it asks for is gathered into slots of the ring that is kept for
// it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "asked_read.hpp"
#include "channel.hpp"
#include "exposures.hpp"
#include "packer.hpp"
#include "staging.hpp"

namespace kvlink {

// The peer gets bytes only of an attempt that is exposed to it, inside that attempt's plan, and under its lease, which
// is looked at anew for every piece of work. What is in the ring after a lease has ended are copies, made under it, and
// the commit that is then refused makes them worth nothing. Used by the engine's thread.
class PackServing {
 public:
  // `ring` is the transport's, which has told the peer of it.
  PackServing(Exposures& exposures, Packer& packer, std::string peer, Slots ring);

  // Takes the peer's ask; throws ProtocolViolation if it cannot be one, is for what the attempt's plan does not have,
  // or for a slot that was not answered yet.
  void accept(const PackAsk& ask);
  bool busy() const { return !works_.empty(); }
  // A bounded piece of work, and the answers that are due; true if there may be more to do at once. Throws what a job
  // throws: the peer is to be lost then.
  bool step(Channel& channel);

 private:
  // In the order of destruction, from the last: the job ends before the look, and that before the exposure.
  struct Work {
    PackAsk ask;
    std::array<std::uint64_t, kMaxAskLeaves> digests{};
    std::shared_ptr<Exposure> exposure = nullptr;
    std::shared_ptr<Exposures::Look> look = nullptr;     // one for all works of an exposure that hold one
    std::unique_ptr<PackJob> job = nullptr;
    std::optional<std::uint32_t> reason = std::nullopt;  // once it is over; 0 if the slot is filled

    std::span<std::uint64_t> leaves() {
      return std::span(digests).first(ask.digests ? static_cast<std::size_t>(leaf_count(ask.end - ask.begin)) : 0);
    }
  };

  PackJob::Step advance(Work& work);
  FailReason look(Work& work);
  static void end(Work& work, std::uint32_t reason);

  Exposures& exposures_;
  Packer& packer_;
  const std::string peer_;
  const Slots ring_;
  std::vector<bool> taken_;   // slots that are to be answered
  std::deque<std::unique_ptr<Work>> works_;
};

}  // namespace kvlink
