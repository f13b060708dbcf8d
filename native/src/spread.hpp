// What a waiter does that finds whom it waits for on its own CPU, where spinning would keep that thread from running.
#pragma once

#include "exposures.hpp"

namespace kvlink {

// Two threads that hand work to each other are slow on one CPU, and the scheduler may leave them there for tens of
// milliseconds with the other CPU idle (measured where only two CPUs share a cache: hardly an idle one is looked for).
// Beside a computation the same place is the best that there is: on one CPU they keep each other busy; spread over two,
// one stands behind the computation while the other has nothing to do. So a waiter moves only where nobody computes.
class Spread {
 public:
  // Moves the calling thread to another of its CPUs, if on the whole machine nothing wants to run but the caller and
  // `working` others that it knows of. It is looked at a thousand times a second at most. False if the thread stays:
  // then it sleeps at once, for its CPU is wanted.
  bool step_aside(Time now, int working);

 private:
  Time last_{};
};

}  // namespace kvlink
