#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/event_loop.h"
#include "base/mutex.h"
#include "base/result.h"
#include "engine/peers/peer.h"

namespace mooncake {

// Queues messages for peers, in the order of the calls. The caller does not wait for a channel,
// whose lock is held while a transfer is copied to its socket.
class Outbox {
 public:
  // The loop uses it until the loop ends.
  Outbox(EventLoop& loop, std::string logName) : loop_(loop), logName_(std::move(logName)) {}

  // See Engine::send().
  Status send(Peer& peer, uint64_t topic, ByteView message);
  // Sends all queued messages, on this thread.
  void flush();
  // Counts all messages that send() has taken, and their bytes.
  struct Accepted {
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };
  Accepted accepted() const;

 private:
  EventLoop& loop_;
  const std::string logName_;
  Mutex sendingMutex_;   // one flush() at a time, or messages would overtake each other
  mutable Mutex mutex_;  // taken after sendingMutex_
  std::vector<std::pair<std::shared_ptr<Peer>, Bytes>> waiting_ GUARDED_BY(mutex_);
  size_t bytes_ GUARDED_BY(mutex_) = 0;
  Accepted accepted_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
