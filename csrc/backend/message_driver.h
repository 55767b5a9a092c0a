#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "backend/completions.h"
#include "base/mutex.h"
#include "collectives/point_to_point.h"
#include "group/group.h"

namespace mooncake {

// Makes progress with messages that no caller waits for, on a thread of its own. A waiting caller
// does it better: meanwhile the thread only looks now and then. While no message is under way, it
// sleeps.
class MessageDriver {
 public:
  MessageDriver(Group& group, std::shared_ptr<Completions> completions, bool lostMessagesReturn);
  ~MessageDriver() { stop(); }

  PointToPoint& messages() { return messages_; }
  const std::shared_ptr<Completions>& completions() const { return completions_; }
  // True: a send or a receive does not raise when its peer is lost. The receive then gives zeros,
  // and MessageWork::failedRanks() names the peer.
  bool lostMessagesReturn() const { return lostMessagesReturn_; }
  // Wakes the thread: a message was posted and is not finished. kExhausted: there is no thread, and
  // the caller must cancel the message.
  Status watch();
  // Runs the task on the completion thread once the message is finished. If there is no thread for
  // its progress, the message is cancelled.
  void whenFinished(std::shared_ptr<Message> message, std::function<void()> task);
  // Runs the task on our thread once the message is finished, or on this one if it is already. The
  // task must neither wait nor need Python's lock: a stream may wait for it. The completion thread
  // drops it.
  void settleWhenFinished(std::shared_ptr<Message> message, std::function<void()> task);
  // Ends every message that is under way, and our thread. True: no other thread is in messages(),
  // so the group may go. False: one still is.
  bool stop(const Error& why = destroyed());
  static Error destroyed();

 private:
  using Tasks = std::vector<std::pair<std::shared_ptr<Message>, std::function<void()>>>;

  // The tasks of finished messages, taken out of the list.
  static Tasks takeFinished(Tasks& tasks);
  void run();
  bool look() EXCLUDES(mutex_);
  bool isUrgent() const REQUIRES(mutex_) { return !settling_.empty() || messages_.awaitsData(); }
  bool isSomeFinished() EXCLUDES(mutex_);
  void settle(std::function<void()> task);
  void notifyFinished() REQUIRES(mutex_);

  const std::shared_ptr<Completions> completions_;
  const bool lostMessagesReturn_;
  PointToPoint messages_;
  Mutex mutex_;
  Condition changed_;
  bool pending_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
  Tasks waiting_ GUARDED_BY(mutex_);
  Tasks settling_ GUARDED_BY(mutex_);
  // Started, with the lock, by the first message that is not finished at once. stop() joins it
  // without: no thread starts once stopping_ is set.
  std::thread thread_;
};

}  // namespace mooncake
