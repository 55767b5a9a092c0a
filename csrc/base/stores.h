#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace mooncake {

// Stores to mapped memory of a device may wait in buffers of the core, and pass each other there.
// This one sends them off, ahead of all later stores.
inline void drainStores() {
#ifdef __x86_64__
  _mm_sfence();
#else
  __sync_synchronize();
#endif
}

}  // namespace mooncake
