// The native tests' only machinery: CHECK ends the process with the place and the expression that did not hold.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#define CHECK(expression)                                                             \
  do {                                                                                \
    if (!(expression)) {                                                              \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #expression);    \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (false)

#define CHECK_REFUSED(expression)                                                                     \
  do {                                                                                                \
    bool refused = false;                                                                             \
    try {                                                                                             \
      static_cast<void>(expression);                                                                  \
    } catch (const std::invalid_argument&) {                                                          \
      refused = true;                                                                                 \
    }                                                                                                 \
    if (!refused) {                                                                                   \
      std::fprintf(stderr, "%s:%d: CHECK_REFUSED(%s)\n", __FILE__, __LINE__, #expression);            \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (false)
