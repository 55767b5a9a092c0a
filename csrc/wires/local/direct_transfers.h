#pragma once

#include <atomic>
#include <vector>

#include "base/mutex.h"
#include "engine/contract/transfer.h"

namespace mooncake {

// The gets and writes of one channel that are running on their callers' threads, so that other
// threads can end them.
class DirectTransfers {
 public:
  // One transfer, on its caller's stack. A thread that cancels it waits for its destructor, so it
  // must end its completion first.
  class Running {
   public:
    Running(DirectTransfers& transfers, const Completion* completion);
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running();

    explicit operator bool() const { return entered_; }  // false: closed
    // Call it every few milliseconds.
    bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

   private:
    friend class DirectTransfers;
    DirectTransfers& transfers_;
    const Completion* completion_;
    std::atomic<bool> cancelled_{false};
    bool entered_ = false;
  };

  // When these return, none of the transfers runs any more.
  void cancel(const Completion* completion) EXCLUDES(mutex_);
  void close() EXCLUDES(mutex_);

 private:
  template <typename Which>
  void end(Which&& which) REQUIRES(mutex_);

  Mutex mutex_;
  Condition left_;
  std::vector<Running*> running_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
