#include "transfer/slot_pool.h"

#include <algorithm>
#include <utility>

namespace mooncake::transfer {

SlotPool::SlotPool(size_t size)
    : mostOfShare_(static_cast<uint32_t>(std::max<size_t>(1, size / 2))),
      alwaysOfShare_(static_cast<uint32_t>(std::max<size_t>(1, size / 16))),
      free_(static_cast<int64_t>(size)) {}

bool SlotPool::mayTake(const SlotShare& share, uint32_t underWay) const {
  return underWay < mostOfShare_ &&
         (underWay < alwaysOfShare_ || free_.load(std::memory_order_seq_cst) > 0 ||
          share.isStalled_.load(std::memory_order_relaxed));
}

SlotPool::Slot SlotPool::tryTake(SlotShare& share) {
  std::atomic<bool>* wish = nullptr;
  for (;;) {
    uint32_t before = share.underWay_.load(std::memory_order_seq_cst);
    if (!mayTake(share, before)) {
      // The wish is set first, then the slots are read again. If a slot is given in between, either
      // this read sees it or the giver sees the wish.
      auto& lacks = before >= mostOfShare_ ? share.isWanted_ : isWanted_;
      if (std::exchange(wish, &lacks) == &lacks) return Slot::kNone;
      lacks.store(true, std::memory_order_seq_cst);
      continue;
    }
    if (!share.underWay_.compare_exchange_weak(before, before + 1, std::memory_order_seq_cst))
      continue;
    if (share.isStalled_.load(std::memory_order_relaxed)) return Slot::kUncounted;
    int64_t free = free_.load(std::memory_order_relaxed);
    while (before < alwaysOfShare_ || free > 0) {
      if (free_.compare_exchange_weak(free, free - 1, std::memory_order_seq_cst))
        return Slot::kCounted;
    }
    // Another driver took the last slot. In between, a third driver may have found the share full.
    give(share, Slot::kUncounted);
    wish = nullptr;
  }
}

void SlotPool::give(SlotShare& share, Slot slot) {
  share.underWay_.fetch_sub(1, std::memory_order_seq_cst);
  if (slot == Slot::kCounted) free_.fetch_add(1, std::memory_order_seq_cst);
  const auto takeWish = [](std::atomic<bool>& wish) {
    return wish.load(std::memory_order_seq_cst) && wish.exchange(false, std::memory_order_seq_cst);
  };
  const bool isOfShare = takeWish(share.isWanted_), isOfPool = takeWish(isWanted_);
  if (isOfShare || isOfPool) wake();
}

void SlotPool::giveBack(SlotShare& share, Slot& slot, Clock::time_point now) {
  slot = Slot::kUncounted;
  const Clock::time_point last{Clock::duration(share.lastSuccess_.load(std::memory_order_relaxed))};
  if (now - last > kPatience) share.isStalled_.store(true, std::memory_order_relaxed);
  free_.fetch_add(1, std::memory_order_seq_cst);
  wake();
}

void SlotPool::succeeded(SlotShare& share, Clock::time_point now) {
  share.lastSuccess_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  if (share.isStalled_.load(std::memory_order_relaxed))
    share.isStalled_.store(false, std::memory_order_relaxed);
}

void SlotPool::ringAll() {
  Lock lock(mutex_);
  news_.fetch_add(1, std::memory_order_seq_cst);
  for (Doorbell* bell : bells_) bell->ring();
}

SlotPool::Rest::Rest(SlotPool& pool, Doorbell& bell) : pool_(pool), bell_(bell) {
  Lock lock(pool_.mutex_);
  pool_.bells_.push_back(&bell_);
  seen_ = pool_.news_.load(std::memory_order_relaxed);
  pool_.resting_.fetch_add(1, std::memory_order_seq_cst);
}

SlotPool::Rest::~Rest() {
  Lock lock(pool_.mutex_);
  pool_.resting_.fetch_sub(1, std::memory_order_relaxed);
  std::erase(pool_.bells_, &bell_);
}

}  // namespace mooncake::transfer
