#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>

#include "base/deadline.h"
#include "base/rank_cores.h"

namespace mooncake {

// Waiters sleep here. A doorbell lies in shared memory or in the process. Any number of threads, of
// any process that maps it, may ring. Ringing costs one load if there is no sleeper.
//
// A ringer makes its data visible with a sequentially consistent read-modify-write (the stamp's
// compare-and-set, see tryStamp in engine/contract/transfer.h) before it calls ring(); a plain or
// release store is not enough. Why no wake-up is lost is written down in wait.cc.
//
// If a process is killed while it sleeps, it stays counted in `sleepers`. From then on each ring of
// this bell costs a system call; nothing else goes wrong.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings{0};  // the futex word
  std::atomic<uint32_t> sleepers{0};

  void ring() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) ringSleepers();
  }
  void ringSleepers();
};
static_assert(sizeof(Doorbell) == 64);
static_assert(
    std::atomic<uint32_t>::is_always_lock_free);  // otherwise it would not work across processes

// A word that a new view or an abort bumps. Every wait remembers the generation from its start and
// ends when the word has changed. After bump(), the caller must ring the doorbells at which the
// waiters sleep.
class Interrupt {
 public:
  uint32_t generation() const { return generation_.load(std::memory_order_acquire); }
  void bump() { generation_.fetch_add(1, std::memory_order_seq_cst); }

 private:
  std::atomic<uint32_t> generation_{0};
};

// Called about ten times a second while its thread sleeps in a wait. To end that wait, the observer
// bumps the interrupt or makes the condition true. Only the thread itself sets its observer.
class SleepObserver {
 public:
  virtual void onSleep() = 0;

  static constexpr Clock::duration kInterval = std::chrono::milliseconds(100);
  // Sets the observer of this thread; null: none. Returns the previous one.
  static SleepObserver* exchange(SleepObserver* observer);

 protected:
  ~SleepObserver() = default;
};

enum class WaitResult { kReady, kTimeout, kInterrupted };

// How long a waiter polls before it sleeps. With more ranks on the host than cores, polling takes
// the core from the very rank that we wait for. A waiter then calls sched_yield between looks
// instead of pausing.
struct SpinPolicy {
  uint32_t pauses = 2000;  // looks with a pause instruction in between (about 40 ns each)
  uint32_t yields = 0;     // looks with a sched_yield in between
  static SpinPolicy forRanksOnHost(int ranks);
  // For data that is certainly on its way: polls for up to 2 ms, which costs less than a sleep.
  SpinPolicy patient() const { return {.pauses = pauses ? 50'000u : 0, .yields = yields}; }
  // For data from sockets: a thread of our own receives it and needs the core, so sleep at once.
  static SpinPolicy forMessages();
};

// The parameters of a wait, besides its condition.
struct Waiter {
  Doorbell& bell;
  const Interrupt& interrupt;
  uint32_t generation;  // generation of `interrupt` when the operation began
  Deadline deadline;
  SpinPolicy spin;
  RankCores* cores = nullptr;  // cores of the ranks waited for, if all are on this host

  // Returns when ready() is true, the interrupt has been bumped or the deadline has passed. ready()
  // wins over the other two. ready() must be cheap, must not throw and may be called many times.
  template <typename Ready>
  WaitResult until(Ready&& ready) const {
    for (uint32_t look = 0; look < spin.pauses; ++look) {
      if (ready()) return WaitResult::kReady;
      pause();
      if (look % kPausesPerLookAround != kPausesPerLookAround - 1) continue;
      if (interrupted()) break;
      if (cores) cores->spread();
    }
    // On a crowded host one yield can take a whole time slice: this loop also checks the deadline.
    for (uint32_t look = 0; look < spin.yields && !interrupted() && !deadline.passed(); ++look) {
      if (ready()) return WaitResult::kReady;
      yield();
      if (cores) cores->spread();
      if (look % kYieldsPerCensus == kYieldsPerCensus - 1 && isAlone()) break;
    }
    for (;;) {
      const uint32_t seen = announce();
      const bool isReady = ready();
      const bool isInterrupted = interrupted();
      const bool isLate = !isReady && !isInterrupted && deadline.passed();
      if (!isReady && !isInterrupted && !isLate) sleep(seen);
      retract();
      if (isReady) return WaitResult::kReady;
      if (isInterrupted) return WaitResult::kInterrupted;
      if (isLate) return WaitResult::kTimeout;
      tellObserver();
    }
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // "yield" is a no-op on most Arm cores
#endif
  }
  static constexpr uint32_t kPausesPerLookAround = 256;  // about 10 us
  static constexpr uint32_t kYieldsPerCensus = 16;
  static void yield() { ::sched_yield(); }
  // True if no other thread has run on this core since the last call, so yielding helps no other
  // rank. While we keep the core busy, the kernel considers the ranks well spread and leaves the
  // ranks that we wait for crowded on another core. If our core sleeps now and then, it gets one of
  // them.
  static bool isAlone();
  bool interrupted() const { return interrupt.generation() != generation; }

  // The slow path, in wait.cc: it makes a system call anyway.
  uint32_t announce() const;  // joins the sleepers, returns the rings counted so far
  void sleep(
      uint32_t seenRings) const;  // until rung or the deadline passes; may also wake up spuriously
  void retract() const;
  static void tellObserver();
};

}  // namespace mooncake
