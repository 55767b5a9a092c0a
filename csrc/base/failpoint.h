#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

// Named places in the code where a test makes this process die, stop or wait. When off, a failpoint
// costs one load of a word that never changes. Only a call from C++ turns failpoints on.
namespace mooncake {

enum class FailpointAction : uint8_t {
  kKill,   // SIGKILL: no goodbye reaches the peers
  kStop,   // SIGSTOP, until a SIGCONT
  kDelay,  // sleeps, and keeps the locks that the thread holds
};

inline std::atomic<bool> areFailpointsOn{false};

void hitFailpoint(const char* name);

inline void failpoint(const char* name) {
  if (areFailpointsOn.load(std::memory_order_relaxed)) [[unlikely]]
    hitFailpoint(name);
}

// Acts at the `nth` pass (counted from 1) of any thread. Arm all failpoints before the threads that
// may pass them start.
void armFailpoint(std::string_view name, uint32_t nth, FailpointAction action,
                  uint32_t delayMilliseconds = 0);
// `observer` is called at every failpoint while they are on, by the passing thread. Set it before
// these threads start.
void observeFailpoints(void (*observer)(const char* name));

}  // namespace mooncake
