#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>

#include "base/mutex.h"
#include "base/result.h"

namespace mooncake {

// The work to which a future with a callback belongs.
struct CallbackOrigin {
  const void* queue = nullptr;  // the work's CollectiveQueue; null: the work has none
  uint64_t era = 0;             // of that queue, when the work was called
  // Number of callbacks of that queue's works that have not ended; null: the work has no queue.
  std::shared_ptr<std::atomic<size_t>> attached = nullptr;
};

// Counts one callback as attached, until it ends or goes.
class AttachedCallback {
 public:
  explicit AttachedCallback(CallbackOrigin origin);
  ~AttachedCallback() { end(); }
  AttachedCallback(const AttachedCallback&) = delete;
  AttachedCallback& operator=(const AttachedCallback&) = delete;
  void end();

 private:
  std::atomic<bool> hasEnded_{false};
  const CallbackOrigin origin_;
};

// While one lives, its thread runs callbacks of futures.
class CallbackScope {
 public:
  explicit CallbackScope(CallbackOrigin origin);
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

  static bool isActive();
  // Origin of the innermost scope of this thread.
  static CallbackOrigin origin();

 private:
  const CallbackOrigin origin_;
  const CallbackScope* const outer_;
};

// Threads that have called operations of a group since its last loss was seen. Autograd's own
// threads are left out: their exceptions reach the thread that called backward().
class Issuers {
 public:
  // Number of the calling thread. Never used again for another thread.
  static uint64_t thisThread();

  void add(uint64_t thread);
  // Also true as long as there are none.
  bool includes(uint64_t thread) const;

 private:
  mutable Mutex mutex_;
  std::set<uint64_t> threads_ GUARDED_BY(mutex_);
};

// A loss that ended an operation in mode `raise`. Operations that the program calls before it has
// seen the exception end with the same error.
class Loss {
 public:
  Loss(Error why, std::shared_ptr<const Issuers> issuers)
      : error_(std::move(why)), issuers_(std::move(issuers)) {}

  const Error& error() const { return error_; }
  // The calling thread is handed the exception. The loss counts as seen if this thread calls
  // operations of the group, and is not in a callback: the program may still be calling then.
  void noteRaised() noexcept;
  // The program has marked it as seen.
  void acknowledge() { isSeen_.store(true, std::memory_order_release); }
  bool isSeen() const { return isSeen_.load(std::memory_order_acquire); }

 private:
  const Error error_;
  const std::shared_ptr<const Issuers> issuers_;
  std::atomic<bool> isSeen_{false};
};

}  // namespace mooncake
