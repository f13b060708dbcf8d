// Getting out of the way of a thread that one waits for.
#pragma once

#include "exposures.hpp"

namespace kvlink {

// Two threads that hand work to each other are slow on one CPU, and the scheduler may leave them there for tens of
// milliseconds (measured on a virtual machine, with the other CPU idle). A waiter sees where its peer runs, so it can
// tell.
class Spread {
 public:
  // Moves the calling thread to another of the CPUs that it may run on, and leaves it free to run on all of them. Not
  // twice in a short time: where all CPUs are busy, moving about helps nobody. False if it stays.
  bool step_aside(Time now);

 private:
  Time last_{};
};

}  // namespace kvlink
