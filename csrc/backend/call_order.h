#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "backend/collective_queue.h"
#include "backend/replays.h"
#include "base/mutex.h"

namespace mooncake {

// The order in which a group's calls go to its queue. Once graphs have calls of the group, replays
// are in the same order, and a call goes when its place has come.
class CallOrder {
 public:
  // Held from the mark of a call on a stream to its place in the queue. Recursive, because a mark may
  // wait for a word of the stream, and signal handlers that run then may call operations.
  RecursiveMutex& mutex() RETURNS_LOCK(mutex_) { return mutex_; }

  // The calls that graphs have; null: none has any.
  Replays* replays() const { return replays_; }
  void use(std::unique_ptr<Replays> replays);
  // Submits a call once it has its place among replays. `mark`: marks the call on its stream; empty:
  // it has none. Throws.
  void follow(const GroupLine& line, std::shared_ptr<CollectiveQueue> queue,
              c10::intrusive_ptr<CollectiveWork> work, const std::function<void()>& mark,
              CollectiveQueue::Run run) REQUIRES(mutex_);

  // Stops the replays. Returns false if a thread is in an operation by the deadline.
  bool stop(Deadline deadline) { return !own_ || own_->stop(deadline); }
  // After stop(): gives them back, or keeps them until the process ends.
  void drop();
  void leak() { (void)own_.release(); }

 private:
  RecursiveMutex mutex_;
  std::unique_ptr<Replays> own_;
  std::atomic<Replays*> replays_ = nullptr;  // the same, for all threads
};

}  // namespace mooncake
