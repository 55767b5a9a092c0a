#include "kernels/device.h"
#include "tests/gpu/probe/kernels.h"

// Kernels of the probe, one block each. They wait as the library's kernels do (kernels/device.h).

using namespace mooncake::kernels;

namespace {

constexpr uint64_t kLookNs = 20'000;  // between two looks at a word of the host

__device__ bool isBehind(const uint32_t* word, uint32_t value) {
  return int32_t(loadAcquireSystem(word) - value) < 0;
}

}  // namespace

extern "C" __global__ void spin(probe::SpinArguments a) {
  while (isBehind(a.word, a.value)) relax();
}

extern "C" __global__ void tell(probe::TellArguments a) {
  if (threadIdx.x == 0) storeReleaseSystem(a.word, a.value);
}

extern "C" __global__ void __launch_bounds__(512, 1) barriers(probe::BarrierArguments a) {
  const int peer = int(threadIdx.x);
  uint32_t longest = 0;
  for (uint32_t round = 1;; ++round) {
    const uint64_t begin = now();
    bool isOver = false;
    if (peer < a.ranks) {
      storeReleaseSystem(a.pages[peer] + a.rank, round);
      uint64_t nextLook = begin + kLookNs;
      while (!isOver && isBehind(a.pages[a.rank] + peer, round)) {
        relax();
        if (now() < nextLook) continue;
        isOver = loadAcquireSystem(a.stop) != 0;
        nextLook = now() + kLookNs;
      }
    }
    // A lone rank waits for none, so it looks here from time to time.
    if (peer == 0 && round % 64 == 0) isOver = isOver || loadAcquireSystem(a.stop) != 0;
    if (__syncthreads_or(isOver)) return;
    if (peer != 0) continue;
    // The first barrier also waits for the start of the other kernels.
    const auto microseconds = uint32_t((now() - begin) / 1000);
    if (round > 1 && microseconds > longest) {
      longest = microseconds;
      storeReleaseSystem(a.progress + 1, longest);
    }
    storeReleaseSystem(a.progress, round);
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) read(probe::ReadArguments a) {
  while (!loadAcquireSystem(a.stop)) {
    uint32_t wrong = 0;
    for (size_t i = threadIdx.x; i < a.count; i += blockDim.x) {
      const volatile uint32_t* const word = a.data + i;  // so that each pass reads it anew
      if (*word != uint32_t(i)) ++wrong;
    }
    if (wrong) atomicAdd_system(a.wrong, wrong);
    if (threadIdx.x == 0) atomicAdd_system(a.passes, 1);
  }
}
