#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/event_loop.h"
#include "base/mutex.h"
#include "engine/contract/evidence.h"
#include "engine/contract/transport.h"

namespace mooncake {

// Makes broken connections again. A connection that ends without a goodbye says little about the
// peer's process. Whether something still listens at its address says more. If so, the side
// that had called calls again, and the other side waits for that. Meanwhile liveness watches the
// peer as before.
//
// Runs on the loop's thread, except stop(). The callbacks run there, too, without a lock. The loop
// uses it until the loop ends.
class Reconnector {
 public:
  // The data that making a connection again needs.
  struct Connection {
    std::shared_ptr<Channel> channel;
    Transport* transport;
    Bytes endpoint;  // where the peer listens; empty: unknown, so the peer must call
    bool isOurs;     // this side calls, as it did the first time
  };
  struct Options {
    std::chrono::milliseconds failureTimeout;  // counts from the break
    // Called when a connection is given up; `evidence` says what this means for the peer.
    std::function<void(const EngineId& peer, const Evidence& evidence)> onLost;
    // Called when a connection works again. `how`: how it had broken; none: only the other end saw
    // it.
    std::function<void(const EngineId& peer, const std::optional<Evidence>& how)> onReconnected;
  };

  Reconnector(EventLoop& loop, Options options) : loop_(loop), options_(std::move(options)) {}

  void reconnect(const EngineId& peer, Connection connection, const Evidence& how);
  // Call it when either end has made the connection again.
  void reconnected(const EngineId& peer);
  // Forgets this peer, whose channel is closed: no reconnection, no callback.
  void drop(const EngineId& peer);

  // Waits up to `patience` for connections that are being made again. Afterwards none is made, and
  // no callback runs. Any thread; on the loop's thread, `patience` must be 0.
  void stop(Clock::duration patience);
  // Releases all channels; call it after stop().
  void forgetAll();

 private:
  struct Broken {
    uint64_t number = 0;  // tells this break from an earlier one of the same peer
    Connection connection;
    Evidence how;
    Deadline deadline = Deadline::after(std::chrono::nanoseconds(0));
    Clock::duration pause{};       // before the next attempt
    uint64_t heard = 0;            // bytes received from the peer when it broke
    bool answered = false;         // something listens at the peer's address
    EventLoop::TimerId timer = 0;  // fires 100 ms after the deadline
  };
  Broken* find(const EngineId& peer, uint64_t number) EXCLUDES(mutex_);
  void connect(const EngineId& peer, uint64_t number);
  void askAfter(const EngineId& peer, uint64_t number);
  void connectLater(const EngineId& peer, uint64_t number);
  void giveUp(const EngineId& peer, uint64_t number, Evidence::Kind kind, const std::string& why);
  std::optional<Broken> forget(const EngineId& peer) EXCLUDES(mutex_);
  std::string inTime() const;

  EventLoop& loop_;
  const Options options_;
  std::map<EngineId, Broken> broken_;
  std::map<EngineId, Broken> lastBroken_;  // last break of each reconnected peer, in case nothing
                                           // arrives before the next one
  uint64_t lastNumber_ = 0;

  Mutex mutex_;
  Condition idle_;
  size_t count_ GUARDED_BY(mutex_) = 0;  // size of broken_
  bool stopped_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
