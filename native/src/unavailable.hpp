// What a machine may lack.
#pragma once

#include <stdexcept>

namespace kvlink {

// The machine lacks something: the message says what, and the remedy.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace kvlink
