#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "backend/completions.h"
#include "collectives/point_to_point.h"
#include "group/group.h"

namespace mooncake {

// Moves messages on while nobody waits for them. Whoever waits does it better, so the thread only
// looks now and then while somebody does, and sleeps for good while nothing is under way.
class MessageDriver {
 public:
  MessageDriver(Group& group, std::shared_ptr<Completions> completions, bool lostMessagesReturn);
  ~MessageDriver() { stop(); }

  PointToPoint& messages() { return messages_; }
  const std::shared_ptr<Completions>& completions() const { return completions_; }
  // A send or a receive whose other side is lost raises nothing: a receive gives zeros, and the
  // work tells by its failed ranks.
  bool lostMessagesReturn() const { return lostMessagesReturn_; }
  // A message was posted and is not finished. kExhausted: there is no thread to move it on, and the
  // caller cancels it.
  Status watch();
  // Runs the task on the completion thread once the message is finished. Without a thread to move
  // the message on it is cancelled.
  void whenFinished(std::shared_ptr<Message> message, std::function<void()> task);
  // Ends every message that is under way; no thread of ours runs afterwards, and no other one is in
  // messages(). The group may go then; not if false: somebody is in there still.
  bool stop();

 private:
  void run();
  void notifyFinished();

  Group& group_;
  const std::shared_ptr<Completions> completions_;
  const bool lostMessagesReturn_;
  PointToPoint messages_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  bool pending_ = false;
  bool stopping_ = false;
  std::vector<std::pair<std::shared_ptr<Message>, std::function<void()>>> waiting_;
  std::thread thread_;  // started by the first message that is not finished at once
};

}  // namespace mooncake
