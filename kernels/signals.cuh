#pragma once

#include "kernels/device.h"
#include "kernels/signals.h"

namespace mooncake::kernels {

// Waits until the word that the rank changes has the value. If that takes too long, or any rank is
// lost, returns false: ranks that know of the loss signal no more.
MC_DEVICE bool awaitWord(const SignalArguments& a, const uint32_t* word, uint32_t value, int peer) {
  uint64_t time = now();
  const uint64_t deadline = time + a.timeoutNs;
  for (uint64_t nextLook = time + kHostLookNs; loadAcquireSystem(word) != value;) {
    time = now();
    if (time > deadline) {
      storeReleaseSystem(&a.host->missed[peer], uint32_t(Missed::kLate));
      return false;
    }
    if (time > nextLook) {
      if (loadRelaxedSystem(&a.host->lost)) return false;
      nextLook = time + kHostLookNs;
    }
    relax();
  }
  return true;
}

}  // namespace mooncake::kernels

// One thread for each rank: first puts a signal, once the rank has taken the one before, then takes
// one. Data that the device has written before the kernel are there once a rank has taken its signal.
extern "C" __global__ void __launch_bounds__(mooncake::kernels::kMaxRanks)
    mooncake_signal(const __grid_constant__ mooncake::kernels::SignalArguments a) {
  using namespace mooncake::kernels;
  const int peer = int(threadIdx.x);
  if (peer >= a.ranks) return;
  const auto first = size_t(a.channel) * size_t(a.ranks);
  if (a.puts >> peer & 1) {
    uint32_t* const theirs = a.pads[peer] + first + a.rank;
    if (!awaitWord(a, theirs, 0, peer)) return;
    storeReleaseSystem(theirs, 1);
  }
  if (a.waits >> peer & 1) {
    uint32_t* const ours = a.pads[a.rank] + first + peer;
    if (awaitWord(a, ours, 1, peer)) storeReleaseSystem(ours, 0);
  }
}
