#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/event_loop.h"
#include "engine/evidence.h"
#include "engine/transports/transport.h"

namespace mooncake {

// Makes connections again. One that ends without a goodbye says little of the process at its other
// end; whether somebody still listens there says more. If so, the one who had called calls again,
// and the other one waits for that. Meanwhile the peer is watched like any other.
//
// All on the loop's thread, but for stop(); the callbacks run there, too, without a lock. The loop
// uses it until the loop ends.
class Reconnector {
 public:
  // What it takes to make one again.
  struct Connection {
    std::shared_ptr<Channel> channel;
    Transport* transport;
    Bytes endpoint;  // where the peer listens; empty: we do not know it, the peer calls
    bool isOurs;     // to make, as it was the first time
  };
  struct Options {
    std::chrono::milliseconds failureTimeout;  // from the break on
    // It is given up: what that says of the peer.
    std::function<void(const EngineId& peer, const Evidence& evidence)> onLost;
    // It stands again. How it had broken; nothing: at its other end only.
    std::function<void(const EngineId& peer, const std::optional<Evidence>& how)> onReconnected;
  };

  Reconnector(EventLoop& loop, Options options) : loop_(loop), options_(std::move(options)) {}

  void reconnect(const EngineId& peer, Connection connection, const Evidence& how);
  // Either end has made it again.
  void reconnected(const EngineId& peer);
  // Nothing is made again, or told, of this peer's channel, which is closed.
  void drop(const EngineId& peer);

  // Waits so long for those that are just being made again; afterwards none is, and nothing is
  // told. Any thread, on the loop's without patience.
  void stop(Clock::duration patience);
  // Lets go of all channels; after stop().
  void forgetAll();

 private:
  struct Broken {
    uint64_t number = 0;  // tells it from an earlier one of the same peer
    Connection connection;
    Evidence how;
    Deadline deadline = Deadline::after(std::chrono::nanoseconds(0));
    Clock::duration pause{};       // until the next attempt
    uint64_t heard = 0;            // of the peer, when it broke
    bool answered = false;         // something listens there
    EventLoop::TimerId timer = 0;  // behind the deadline
  };
  Broken* find(const EngineId& peer, uint64_t number);
  void connect(const EngineId& peer, uint64_t number);
  void askAfter(const EngineId& peer, uint64_t number);
  void connectLater(const EngineId& peer, uint64_t number);
  void giveUp(const EngineId& peer, uint64_t number, Evidence::Kind kind, const std::string& why);
  std::optional<Broken> forget(const EngineId& peer);
  std::string inTime() const;

  EventLoop& loop_;
  const Options options_;
  std::map<EngineId, Broken> broken_;
  std::map<EngineId, Broken> lastBroken_;  // reconnected, but nothing may have come since
  uint64_t lastNumber_ = 0;

  std::mutex mutex_;  // guards count_ and stopped_
  std::condition_variable idle_;
  size_t count_ = 0;  // of broken_
  bool stopped_ = false;
};

}  // namespace mooncake
