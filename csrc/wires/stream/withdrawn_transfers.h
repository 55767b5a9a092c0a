#pragma once

#include <set>
#include <vector>

#include "base/mutex.h"
#include "engine/contract/transfer.h"

namespace mooncake {

// Transfers that a thread has withdrawn and will end. Another thread, which cancels transfers of the
// same completion, waits for that: the completion may be gone when it returns. Thread-safe.
class WithdrawnTransfers {
 public:
  // Called under the lock under which the transfers were withdrawn. Each has its completion.
  void add(const std::vector<Completion*>& withdrawn) {
    Lock lock(mutex_);
    open_.insert(withdrawn.begin(), withdrawn.end());
  }
  void end(const std::vector<Completion*>& withdrawn, ErrorCode code) {
    for (Completion* one : withdrawn) one->end(code);
    Lock lock(mutex_);
    for (const Completion* one : withdrawn) open_.erase(open_.find(one));
    ended_.notify_all();
  }
  // Waits until the completion's transfers have ended.
  void await(const Completion* completion) {
    Lock lock(mutex_);
    ended_.wait(mutex_, [&]() REQUIRES(mutex_) { return !open_.contains(completion); });
  }

 private:
  Mutex mutex_;
  Condition ended_;
  std::multiset<const Completion*> open_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
