#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/event_loop.h"
#include "engine/transports/transport.h"

namespace mooncake {

// Where the messages of peers go: each names a topic, and whoever has opened that gets it. A peer
// may be ahead of us, so what comes for a topic that is not open yet is kept: the newest messages
// of each peer for each topic, and of all together as many as fit a bound. The oldest go first.
// Nobody learns what went, so whoever needs an answer asks again until it comes.
class MessageRouter {
 public:
  // On the loop's thread, without a lock.
  using OnMessage = std::function<void(const EngineId& from, ByteView message)>;
  static constexpr size_t kMostEarly = 16;  // of one peer for one topic
  static constexpr size_t kMostEarlyBytes = size_t(16) << 20;

  explicit MessageRouter(EventLoop& loop) : loop_(loop) {}

  // What came early is handed over first. Any thread. Nobody else may hold this topic open.
  void open(uint64_t topic, OnMessage handler);
  // The handler does not run any more when this returns, and what comes later is as early as
  // before. Any thread. On the loop's thread this is at once, from within the handler, too; on
  // others it waits for the handler: hold no lock that it takes.
  void close(uint64_t topic);
  void closeAll();

  // On the loop's thread: a message as encode() made it.
  void deliver(const EngineId& from, ByteView message);

  // Wire form: u64 topic, then the message, which is not empty.
  static Bytes encode(uint64_t topic, ByteView message);
  static constexpr size_t kMostBytes = Channel::kMaxMessageBytes - sizeof(uint64_t);

 private:
  using Sender = std::pair<uint64_t, EngineId>;  // for which topic, and who
  struct Early {
    uint64_t order;  // of arrival
    Bytes message;
  };
  using Queue = std::map<Sender, std::deque<Early>>::iterator;
  struct Topic {
    std::shared_ptr<const OnMessage> handler;
    bool caughtUp = false;  // nothing early waits for it: messages may come directly
  };
  using Lock = std::unique_lock<std::mutex>;
  void keep(uint64_t topic, const EngineId& from, ByteView message);
  Early takeOldest(Queue queue);
  Queue firstEarly(uint64_t topic);
  void catchUp(Lock& lock, uint64_t topic, std::shared_ptr<const OnMessage> handler);
  void run(Lock& lock, const std::shared_ptr<const OnMessage>& handler, const EngineId& from,
           ByteView message);

  EventLoop& loop_;
  std::mutex mutex_;  // guards all below
  std::condition_variable handled_;
  std::map<uint64_t, Topic> topics_;
  const OnMessage* running_ = nullptr;
  std::map<Sender, std::deque<Early>> early_;  // none is empty
  std::map<uint64_t, Sender> arrivals_;        // of all that is early, by order
  uint64_t lastArrival_ = 0;
  size_t earlyBytes_ = 0;
};

}  // namespace mooncake
