#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "base/event_loop.h"
#include "engine/transports/transport.h"

namespace mooncake {

// Where the messages of peers go: each names a door, and whoever has opened that gets it. A peer
// may be ahead of us, so what comes for a door that is not open yet is kept, up to a bound: then
// the oldest goes, for whoever says something important says it again.
class Doors {
 public:
  // On the loop's thread, without a lock.
  using OnMessage = std::function<void(const EngineId& from, ByteView message)>;
  static constexpr size_t kMostEarly = 1024;
  static constexpr size_t kMostEarlyBytes = size_t(4) << 20;

  explicit Doors(EventLoop& loop) : loop_(loop) {}

  // What came early is handed over first. Any thread. Nobody else may hold this door open.
  void open(uint64_t door, OnMessage handler);
  // The handler does not run any more when this returns, and what comes later is as early as
  // before. Any thread. On the loop's thread this is at once, from within the handler, too; on
  // others it waits for the handler: hold no lock that it takes.
  void close(uint64_t door);
  void closeAll();

  // On the loop's thread: a message as encode() made it.
  void deliver(const EngineId& from, ByteView message);

  // Wire form: u64 door, then the message, which is not empty.
  static Bytes encode(uint64_t door, ByteView message);
  static constexpr size_t kMostBytes = Channel::kMaxMessageBytes - sizeof(uint64_t);

 private:
  struct Early {
    uint64_t door;
    EngineId from;
    Bytes message;
  };
  struct Door {
    std::shared_ptr<const OnMessage> handler;
    bool caughtUp = false;  // nothing early waits for it: messages may come directly
  };
  using Lock = std::unique_lock<std::mutex>;
  void keep(Early early);
  std::optional<Early> takeEarly(uint64_t door);
  bool hasEarly(uint64_t door) const;
  void catchUp(uint64_t door, const std::shared_ptr<const OnMessage>& handler);
  void run(Lock& lock, const std::shared_ptr<const OnMessage>& handler, const EngineId& from,
           ByteView message);

  EventLoop& loop_;
  std::mutex mutex_;  // guards all below
  std::condition_variable handled_;
  std::map<uint64_t, Door> doors_;
  const OnMessage* running_ = nullptr;
  std::deque<Early> early_;
  size_t earlyBytes_ = 0;
};

}  // namespace mooncake
