#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/wait.h"

namespace mooncake::transfer {

// The slots that transfers with one segment hold. A member of the segment.
class SlotShare {
 private:
  friend class SlotPool;
  std::atomic<uint32_t> underWay_{0};  // transfers, with and without a slot of the pool
  std::atomic<bool> isStalled_{false};
  std::atomic<bool> isWanted_{false};  // a transfer was turned away because the share was used up
  std::atomic<Clock::rep> lastSuccess_{0};
};

// Bounds the transfers that an engine has under way, in all and with each segment. All drivers of
// the engine share it. Any thread.
//
// A peer that does not answer must cost the other peers nothing:
// - A segment has at most half of the pool under way.
// - A segment may always have a sixteenth of the pool under way, even if the pool is empty.
// - A transfer that lasts longer than kPatience gives its slot back and stays under way.
// - A segment without a success within kPatience is stalled. Its new transfers take no slot of the
//   pool until one of them succeeds.
class SlotPool {
 public:
  static constexpr auto kPatience = std::chrono::milliseconds(10);

  explicit SlotPool(size_t size);

  enum class Slot : uint8_t {
    kNone,      // the transfer may not begin
    kCounted,   // it holds a slot of the pool
    kUncounted  // it holds none: its segment is stalled, or it gave the slot back
  };
  Slot tryTake(SlotShare& share);
  // A transfer has ended.
  void give(SlotShare& share, Slot slot);
  // A transfer with a counted slot has lasted longer than kPatience. Returns the slot to the pool.
  void giveBack(SlotShare& share, Slot& slot, Clock::time_point now);
  // A transfer has ended well: the segment is not stalled.
  void succeeded(SlotShare& share, Clock::time_point now);

  // Registers a driver that can begin nothing and holds no counted slot, until it has news. Lives
  // on the driver's stack. After the construction the driver calls tryTake() for all waiting tasks.
  // A slot that is freed later, and lets one of them begin, rings the bell.
  class Rest {
   public:
    Rest(SlotPool& pool, Doorbell& bell);
    Rest(const Rest&) = delete;
    Rest& operator=(const Rest&) = delete;
    ~Rest();
    bool hasNews() const { return pool_.news_.load(std::memory_order_acquire) != seen_; }

   private:
    SlotPool& pool_;
    Doorbell& bell_;
    uint32_t seen_;
  };
  // Ends every rest: a slot is free, or new tasks wait.
  void wake() {
    if (resting_.load(std::memory_order_seq_cst) != 0) ringAll();
  }

 private:
  bool mayTake(const SlotShare& share, uint32_t underWay) const;
  void ringAll() EXCLUDES(mutex_);

  const uint32_t mostOfShare_;
  const uint32_t alwaysOfShare_;
  std::atomic<int64_t> free_;          // negative while segments use their guaranteed sixteenth
  std::atomic<bool> isWanted_{false};  // a transfer was turned away because the pool was used up
  std::atomic<uint32_t> resting_{0};
  std::atomic<uint32_t> news_{0};
  Mutex mutex_;
  std::vector<Doorbell*> bells_ GUARDED_BY(mutex_);
};

}  // namespace mooncake::transfer
