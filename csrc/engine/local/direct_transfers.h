#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

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

  // When these return, none of those transfers runs any more.
  void cancel(const Completion* completion);
  void close();

 private:
  template <typename Which>
  void end(std::unique_lock<std::mutex>& lock, Which&& which);

  std::mutex mutex_;  // guards running_ and closed_
  std::condition_variable left_;
  std::vector<Running*> running_;
  bool closed_ = false;
};

}  // namespace mooncake
