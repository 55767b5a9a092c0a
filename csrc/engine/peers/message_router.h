#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "base/event_loop.h"
#include "base/mutex.h"
#include "engine/contract/transport.h"

namespace mooncake {

// Delivers the messages of peers: each names a topic, and goes to the handler that has opened it. A
// peer may be ahead of us, so messages for a topic that is not open yet are kept. Each peer's
// newest messages per topic are kept, and the total is bounded. The oldest are dropped first. No
// sender learns of a dropped message: if it needs an answer, it repeats its request until the
// answer comes.
class MessageRouter {
 public:
  // On the loop's thread, without a lock.
  using OnMessage = std::function<void(const EngineId& from, ByteView message)>;
  static constexpr size_t kMostEarly = 16;  // per peer and topic
  static constexpr size_t kMostEarlyBytes = size_t(16) << 20;

  explicit MessageRouter(EventLoop& loop) : loop_(loop) {}

  // Early messages reach the handler first. Any thread. The topic must not be open already.
  void open(uint64_t topic, OnMessage handler);
  // When this returns, the handler does not run any more, and later messages count as early again.
  // Any thread. On the loop's thread this returns at once, even from within the handler. Other
  // threads wait for the handler: hold no lock that it takes.
  void close(uint64_t topic);
  void closeAll();

  // Delivers a message that encode() made. On the loop's thread.
  void deliver(const EngineId& from, ByteView message);

  // Wire form: u64 topic, then the message, which is not empty.
  static Bytes encode(uint64_t topic, ByteView message);
  static constexpr size_t kMostBytes = Channel::kMaxMessageBytes - sizeof(uint64_t);

 private:
  using Sender = std::pair<uint64_t, EngineId>;  // the topic and the sender
  struct Early {
    uint64_t order;  // sequence number of the arrival
    Bytes message;
  };
  using Queue = std::map<Sender, std::deque<Early>>::iterator;
  struct Topic {
    std::shared_ptr<const OnMessage> handler;
    bool caughtUp = false;  // no early message waits for it: messages may be delivered directly
  };
  void keep(uint64_t topic, const EngineId& from, ByteView message) REQUIRES(mutex_);
  Early takeOldest(Queue queue) REQUIRES(mutex_);
  Queue firstEarly(uint64_t topic) REQUIRES(mutex_);
  // Both give the lock back while a handler runs.
  void catchUp(uint64_t topic, std::shared_ptr<const OnMessage> handler) REQUIRES(mutex_);
  void run(const std::shared_ptr<const OnMessage>& handler, const EngineId& from, ByteView message)
      REQUIRES(mutex_);

  EventLoop& loop_;
  Mutex mutex_;
  Condition handled_;
  std::map<uint64_t, Topic> topics_ GUARDED_BY(mutex_);
  const OnMessage* running_ GUARDED_BY(mutex_) = nullptr;
  std::map<Sender, std::deque<Early>> early_ GUARDED_BY(mutex_);  // no queue is empty
  std::map<uint64_t, Sender> arrivals_ GUARDED_BY(mutex_);        // of all early messages, by order
  uint64_t lastArrival_ GUARDED_BY(mutex_) = 0;
  size_t earlyBytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake
