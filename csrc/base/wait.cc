#include "base/wait.h"

#include <algorithm>
#include <climits>
#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <utility>

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer does not follow fences. The one below publishes no data, so it misses nothing.
#pragma GCC diagnostic ignored "-Wtsan"
#endif

// Why no wake-up is lost. D is a word that ready() looks at, or the generation of the interrupt.
//
//   ringer                                    sleeper
//   R1  D: read-modify-write, seq_cst         S1  sleepers += 1, seq_cst         announce()
//   R2  read sleepers, seq_cst                S2  fence, seq_cst
//   R3  if not 0: rings += 1, release         S3  seen = rings, acquire
//   R4            futex wake                  S4  read D, acquire                ready()
//                                             S5  futex wait, if rings == seen   sleep()
//
// Say that S4 misses R1: only then does the sleeper go to sleep. Two things could go wrong.
//
// The ringer saw no sleeper. Then R2 came before S1 in the one order of all seq_cst operations,
// that is R1 < R2 < S1 < S2, and a read after the fence S2 cannot miss the seq_cst write R1 before
// it. The fence is needed because S4 is an acquire load: without it, S4 may be carried out before
// S1.
//
// The ringer rang before S3, and `seen` counts the ring already. Then S3 synchronizes with R3, so
// S4 sees R1.
//
// Neither can be, so R3 comes after S3. If it comes before S5, the kernel finds rings != seen and
// S5 returns at once; else the kernel has queued the sleeper before R4 looks for it (compare and
// queue are one step under the kernel's lock). Only 2^32 rings between S3 and S5 could fool it.

namespace mooncake {
namespace {

// Not FUTEX_PRIVATE: the word may lie in memory that other processes share.
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                   FUTEX_BITSET_MATCH_ANY);
}

thread_local SleepObserver* observer = nullptr;
thread_local Clock::time_point nextTold;  // when the observer is due; set by its first sleep

int coresOfThisProcess() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));  // more than CPU_SETSIZE cores
}

}  // namespace

SleepObserver* SleepObserver::exchange(SleepObserver* next) {
  nextTold = {};
  return std::exchange(observer, next);
}

void Doorbell::ringSleepers() {
  rings.fetch_add(1, std::memory_order_release);
  futex(&rings, FUTEX_WAKE, INT_MAX, nullptr);
}

SpinPolicy SpinPolicy::forRanksOnHost(int ranks) {
  if (ranks <= coresOfThisProcess()) return {.pauses = 2000, .yields = 0};
  return {.pauses = 0, .yields = 500};
}

SpinPolicy SpinPolicy::forMessages() { return {.pauses = 0, .yields = 0}; }

bool Waiter::isAlone() {
  thread_local long lastSwitches = -1;
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  const long switches = usage.ru_nvcsw + usage.ru_nivcsw;
  return std::exchange(lastSwitches, switches) == switches;
}

uint32_t Waiter::announce() const {
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return bell.rings.load(std::memory_order_acquire);
}

void Waiter::sleep(uint32_t seenRings) const {
  // The bitset form takes an absolute time on CLOCK_MONOTONIC, the clock of steady_clock.
  if (observer && nextTold == Clock::time_point())
    nextTold = Clock::now() + SleepObserver::kInterval;
  const auto end = observer ? std::min(deadline.when(), nextTold) : deadline.when();
  const auto when = end.time_since_epoch();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(when);
  const timespec until{.tv_sec = seconds.count(), .tv_nsec = (when - seconds).count()};
  futex(&bell.rings, FUTEX_WAIT_BITSET, seenRings, &until);
}

void Waiter::tellObserver() {
  if (!observer || Clock::now() < nextTold) return;
  nextTold = Clock::now() + SleepObserver::kInterval;
  observer->onSleep();
}

void Waiter::retract() const { bell.sleepers.fetch_sub(1, std::memory_order_release); }

}  // namespace mooncake
