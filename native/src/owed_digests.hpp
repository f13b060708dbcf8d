// Source side, for a transport whose targets read the memory by themselves: the leaf digests that a peer has asked for
// over the channel, computed in bounded slices, the attempts in turn.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "channel.hpp"
#include "exposures.hpp"

namespace kvlink {

class OwedDigests {
 public:
  // False if the attempt cannot be digested (any more): the peer has been told.
  bool want(Exposures& exposures, Channel& channel, const std::string& peer, AttemptId attempt);
  // The next slice; false if nothing is owed, or the peer does not take it now.
  bool pay(Exposures& exposures, Channel& channel);
  bool any() const { return !wanted_.empty(); }
  void clear() { wanted_.clear(); }

 private:
  std::deque<std::shared_ptr<Exposure>> wanted_;
};

}  // namespace kvlink
