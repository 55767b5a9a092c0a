#pragma once

#include <cstdint>

#include "kernels/group_state.h"

// The argument of the kernel for signals between ranks that share symmetric memory of torch's.
namespace mooncake::kernels {

enum class Missed : uint32_t { kNone, kLate };

// Memory of the host that the device maps.
struct SignalWords {
  uint64_t lost = 0;                // nonzero: all waits end; written by the host
  uint32_t missed[kMaxRanks] = {};  // a Missed for each rank that a kernel has waited for in vain
};

// The word for signals of rank `from` on a channel is number channel * ranks + from of the receiver's
// pad: 1 from a signal until it is taken, else 0. So torch's own kernels use it.
struct SignalArguments {
  SignalWords* host;
  uint32_t* pads[kMaxRanks];  // of each rank, at this device's addresses
  int rank;
  int ranks;
  uint32_t channel;
  uint64_t puts, waits;  // bits of the ranks that get a signal, and of the ranks that give one
  uint64_t timeoutNs;    // for each of the two
};

}  // namespace mooncake::kernels
