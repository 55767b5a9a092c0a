#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "engine/transfer.h"

namespace mooncake {

// The gets and writes of one channel that run on their callers' threads right now, so that other
// threads can
// end them.
class DirectTransfers {
 public:
  // One transfer, on its caller's stack. Whoever cancels it waits for its destructor, so it ends
  // its completion before that.
  class Running {
   public:
    Running(DirectTransfers& transfers, const Completion* completion);
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running();

    explicit operator bool() const { return entered_; }  // false: closed
    // To be asked every few milliseconds.
    bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

   private:
    friend class DirectTransfers;
    DirectTransfers& transfers_;
    const Completion* completion_;
    std::atomic<bool> cancelled_{false};
    bool entered_ = false;
  };

  // Both return when none of those runs any more.
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
