#include "engine/peers/message_router.h"

#include <utility>

namespace mooncake {
namespace {

// Overhead of a kept message, beside its bytes.
constexpr size_t kOverhead = 256;

}  // namespace

Bytes MessageRouter::encode(uint64_t topic, ByteView message) {
  return ByteWriter().put(topic).putRaw(message).take();
}

void MessageRouter::open(uint64_t topic, OnMessage handler) {
  auto shared = std::make_shared<const OnMessage>(std::move(handler));
  Lock lock(mutex_);
  const bool caughtUp = firstEarly(topic) == early_.end();
  topics_[topic] = {shared, caughtUp};
  if (caughtUp) return;
  loop_.post([this, topic, shared] {
    Lock lock(mutex_);
    catchUp(topic, shared);
  });
}

void MessageRouter::close(uint64_t topic) {
  std::shared_ptr<const OnMessage> last;  // destroyed without the lock, because it may own anything
  Lock lock(mutex_);
  const auto found = topics_.extract(topic);
  if (!found) return;
  last = found.mapped().handler;
  if (!loop_.onLoopThread())
    handled_.wait(mutex_, [&]() REQUIRES(mutex_) { return running_ != last.get(); });
}

void MessageRouter::closeAll() {
  std::map<uint64_t, Topic> last;
  Lock lock(mutex_);
  last.swap(topics_);
  if (!loop_.onLoopThread())
    handled_.wait(mutex_, [&]() REQUIRES(mutex_) { return running_ == nullptr; });
}

void MessageRouter::deliver(const EngineId& from, ByteView message) {
  ByteReader in(message);
  const auto topic = in.get<uint64_t>();
  if (in.failed() || in.left() == 0) return;  // too short to mean anything
  message = in.getRaw(in.left());
  Lock lock(mutex_);
  auto found = topics_.find(topic);
  if (found != topics_.end() && !found->second.caughtUp) {
    // Deliver the early messages now, not in the posted task: the bound on kept messages is not
    // meant for open topics.
    catchUp(topic, found->second.handler);
    found = topics_.find(topic);
  }
  if (found != topics_.end() && found->second.caughtUp) {
    run(found->second.handler, from, message);
  } else {
    keep(topic, from, message);
  }
}

void MessageRouter::catchUp(uint64_t topic, std::shared_ptr<const OnMessage> handler) {
  for (;;) {
    const auto found = topics_.find(topic);
    if (found == topics_.end() || found->second.handler != handler) return;
    const Queue queue = firstEarly(topic);
    if (queue == early_.end()) {
      found->second.caughtUp = true;
      return;
    }
    const EngineId from = queue->first.second;
    const Early early = takeOldest(queue);
    run(handler, from, early.message);
  }
}

// The handler is kept alive here, because it may close its own topic.
void MessageRouter::run(const std::shared_ptr<const OnMessage>& handler, const EngineId& from,
                        ByteView message) {
  std::shared_ptr<const OnMessage> held = handler;
  running_ = held.get();
  {
    const UnlockedScope unlocked(mutex_);
    (*held)(from, message);
    held.reset();  // before close() returns
  }
  running_ = nullptr;
  handled_.notify_all();
}

void MessageRouter::keep(uint64_t topic, const EngineId& from, ByteView message) {
  const auto queue = early_.try_emplace({topic, from}).first;
  queue->second.push_back({++lastArrival_, Bytes(message.begin(), message.end())});
  arrivals_[lastArrival_] = queue->first;
  earlyBytes_ += message.size() + kOverhead;
  if (queue->second.size() > kMostEarly) takeOldest(queue);
  while (earlyBytes_ > kMostEarlyBytes) takeOldest(early_.find(arrivals_.begin()->second));
}

// Removes the oldest message of one sender's queue. A sender's messages to one topic stay in order.
MessageRouter::Early MessageRouter::takeOldest(Queue queue) {
  Early oldest = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) early_.erase(queue);
  arrivals_.erase(oldest.order);
  earlyBytes_ -= oldest.message.size() + kOverhead;
  return oldest;
}

// Returns the queue of a sender that has early messages for the topic; end(): there is none.
MessageRouter::Queue MessageRouter::firstEarly(uint64_t topic) {
  const auto found = early_.lower_bound({topic, EngineId{}});
  return found != early_.end() && found->first.first == topic ? found : early_.end();
}

}  // namespace mooncake
