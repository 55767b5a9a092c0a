#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

// Named places in the code where a test has this process die, stop or wait. Free when off: one load
// of a word that nobody writes. Nothing but a call from C++ turns them on.
namespace mooncake {

enum class FailpointAction : uint8_t {
  kKill,   // SIGKILL: nothing is said to anybody
  kStop,   // SIGSTOP, until somebody sends SIGCONT
  kDelay,  // sleeps, with whatever locks are held there
};

inline std::atomic<bool> areFailpointsOn{false};

void hitFailpoint(const char* name);

inline void failpoint(const char* name) {
  if (areFailpointsOn.load(std::memory_order_relaxed)) [[unlikely]]
    hitFailpoint(name);
}

// At the nth time, from 1 on, that any thread comes by. Further ones: before the threads that may
// come by start.
void armFailpoint(std::string_view name, uint32_t nth, FailpointAction action,
                  uint32_t delayMilliseconds = 0);
// Called at every failpoint while they are on, by the thread that comes by. Like armFailpoint().
void observeFailpoints(void (*observer)(const char* name));

}  // namespace mooncake
