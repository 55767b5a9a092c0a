#pragma once

#include <atomic>
#include <cstdint>
#include <linux/futex.h>
#include <sys/types.h>

#include "engine/contract/crash_report.h"

namespace mooncake {

// Lies in an engine's arena and shows processes that map it whether the engine's process lives. The
// liveness thread holds `holder` as a robust futex (get_robust_list(2)). The kernel marks it as
// soon as that thread dies, however it dies. That is before the process frees its memory and closes
// its sockets: 0.3 ms after a SIGKILL at any size, while the socket's end took 46 ms with 3 GiB. A
// forked child cannot hold or inherit it. The mark alone proves the end of a thread only, which a
// sandbox may kill by itself. The end of the process needs PeerProcess, or the end of its
// connection.
struct alignas(64) LifeWord {
  std::atomic<uint32_t> holder{0};  // the thread's id; kGone: not started yet, or left in peace
  std::atomic<uint32_t> beats{0};   // grows while the process runs, also when its callers do not
  std::atomic<uint32_t> period{0};  // ms from the last beat to the next one
  CrashReport crashReport;          // the engine's last report

  static constexpr uint32_t kGone = 0;
  static bool isMarked(uint32_t holder) { return (holder & FUTEX_OWNER_DIED) != 0; }
};

// A peer's life word, if it is mapped here.
struct PeerLife {
  const LifeWord* word = nullptr;  // null: not mapped here
  pid_t process = 0;               // its number in our pid namespace; 0: not visible there
};

}  // namespace mooncake
