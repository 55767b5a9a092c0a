#pragma once

#include <atomic>
#include <cstdint>
#include <linux/futex.h>
#include <sys/types.h>

#include "engine/crash_report.h"

namespace mooncake {

// Lies in an engine's arena and shows the processes that map it whether the engine's own lives. Its
// liveness thread holds `holder` as a robust futex (get_robust_list(2)): the kernel marks it as
// soon as that thread dies, however it dies, which is before the process gives back its memory and
// closes its sockets: 0.3 ms after a SIGKILL at any size, where the end of the socket took 46 ms
// with 3 GiB. No forked child can hold it, none inherits it. The mark alone is the end of a thread,
// which a sandbox may kill for itself: what is said of the process needs PeerProcess, or the end of
// its connection.
struct alignas(64) LifeWord {
  std::atomic<uint32_t> holder{0};  // the thread's id; kGone: not there yet, or left in peace
  std::atomic<uint32_t> beats{0};   // grows while the process runs, also when its callers do not
  std::atomic<uint32_t> period{0};  // ms to the next beat, when the last one came
  CrashReport crashReport;          // its last report

  static constexpr uint32_t kGone = 0;
  static bool isMarked(uint32_t holder) { return (holder & FUTEX_OWNER_DIED) != 0; }
};

// Where a peer's is mapped.
struct PeerLife {
  const LifeWord* word = nullptr;  // null: not mapped here
  pid_t process = 0;               // as a number of our pid namespace; 0: not visible from there
};

}  // namespace mooncake
