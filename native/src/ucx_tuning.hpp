// What KVLink sets in UCX, unless the environment sets it. One table: applied by UcxContext, shown by `kvlink doctor`.
#pragma once

#include <array>

namespace kvlink {

struct UcxSetting {
  const char* name;  // without UCX_
  const char* value;
  const char* why;
  bool required;  // a UCX that refuses it cannot be used; otherwise it does without
};

inline constexpr std::array<UcxSetting, 3> kUcxTuning{{
    {"RNDV_THRESH", "inf",
     "in peer error mode, without which a dead peer goes unnoticed, it restores zero-copy over CMA", true},
    {"TCP_TX_SEG_SIZE", "256k", "UCX emulates gets over TCP by messages: longer ones cost fewer calls", false},
    {"TCP_RX_SEG_SIZE", "256k", "the receiving half of the same", false},
}};

}  // namespace kvlink
