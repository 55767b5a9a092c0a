#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "base/mutex.h"

namespace mooncake {

// Hooks that are called for every operation of a group that has ended well, with the key of its
// Work. A hook runs on the thread that found the end, with locks of ours held: it must not call us,
// nor wait for Python's lock. Hooks run without mutex_: a caller of remove() may hold a lock that
// its hook takes.
class CompletionHooks {
 public:
  using Hook = std::function<void(uint64_t key)>;

  CompletionHooks();
  void add(int64_t id, Hook hook);
  void remove(int64_t id);

  uint64_t newKey() { return nextKey_.fetch_add(1, std::memory_order_relaxed); }
  bool any() const { return any_.load(std::memory_order_acquire); }
  void tell(uint64_t key) const {
    if (any()) tellAll(key);
  }

 private:
  using Hooks = std::map<int64_t, Hook>;
  void change(const std::function<void(Hooks&)>& how);
  void tellAll(uint64_t key) const;

  std::atomic<uint64_t> nextKey_;
  std::atomic<bool> any_{false};
  mutable Mutex mutex_;
  std::shared_ptr<const Hooks> hooks_ GUARDED_BY(mutex_);  // replaced as a whole
};

}  // namespace mooncake
