#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/mutex.h"
#include "base/result.h"
#include "base/stop_signal.h"
#include "engine/contract/evidence.h"
#include "engine/contract/transport.h"
#include "engine/peers/liveness.h"
#include "engine/peers/peer.h"

namespace mooncake {

// The peers of an engine: calls them, admits their calls, and keeps them until they are forgotten.
// connect_all.cc has connect(). Thread-safe.
class Connections {
 public:
  struct Options {
    EngineId id;          // of this engine
    std::string logName;  // see EngineOptions, as idleAfter
    std::chrono::milliseconds idleAfter{0};
    // All run on the loop's thread, without a lock. A peer's connection had broken before its channel
    // came to us.
    std::function<void(const EngineId& peer, const Evidence& how)> onBroken;
    // A peer is being dropped. Earlier evidence about it has been handled.
    std::function<void(const EngineId& peer)> onDropped;
  };
  // All outlive this object.
  Connections(EventLoop& loop, Liveness& liveness,
              const std::vector<std::unique_ptr<Transport>>& transports, Options options)
      : loop_(loop), liveness_(liveness), transports_(transports), options_(std::move(options)) {}

  // See Engine.
  Result<std::vector<std::shared_ptr<Peer>>> connect(const std::vector<Bytes>& endpoints,
                                                     Deadline deadline);
  Result<std::shared_ptr<Peer>> open(ByteView endpoint, std::string name, Deadline deadline,
                                     const StopSignal* stop);
  Status forget(const std::shared_ptr<Peer>& peer, Deadline deadline);
  std::vector<std::shared_ptr<Peer>> lateWriters();

  // For TransportContext, on the loop's thread.
  bool admits(const EngineId& id);
  void onAccepted(const EngineId& id, std::shared_ptr<Channel> channel);

  // Returns the peer's latest object, or null. A peer that connected and left before we look counts
  // as connected: its user finds it disconnected. An engine's id is never reused, so nothing comes
  // after.
  std::shared_ptr<Peer> find(const EngineId& id) const;
  std::map<EngineId, std::shared_ptr<Peer>> all() const;
  // Returns the endpoint of a connected peer; empty: it is not known.
  Bytes endpointOf(const EngineId& id) const;
  Bytes endpointOf(const Peer& peer) const;  // also of one that is disconnected or forgotten
  // Keeps the endpoint of a connected peer that has called us, and names it for the log.
  void noteEndpoint(const EngineId& id, ByteView endpoint, const std::string& name);
  // Marks the peer as disconnected, for this reason. Returns it if it was not marked before, else
  // null. A peer whose channel has not come yet is marked when it comes.
  std::shared_ptr<Peer> end(const EngineId& id, const Evidence& evidence);
  void countReconnection();
  // For the log. "a peer": it has no name yet.
  std::string nameOf(const Peer& peer) const;
  // Ends idle connections and drops peers that are long gone, from now on.
  void startCollecting();
  // Drops all peers without another word.
  void clear();

  struct Counters {  // see EngineCounters
    uint64_t opened = 0, reused = 0, active = 0, pending = 0, retries = 0;
    uint64_t connections = 0, addresses = 0, collected = 0;
  };
  Counters counters() const;

 private:
  std::shared_ptr<Peer> known(const EngineId& id) const REQUIRES(mutex_);
  Result<std::vector<std::shared_ptr<Peer>>> connectAll(const std::vector<EngineId>& ids,
                                                        const std::vector<Bytes>& endpoints,
                                                        Deadline deadline) EXCLUDES(mutex_);
  Status callAll(const std::vector<EngineId>& ids, const std::vector<Bytes>& endpoints,
                 std::vector<size_t> wanted, Deadline deadline) EXCLUDES(callMutex_);
  std::vector<size_t> awaitCallers(const std::vector<EngineId>& ids, Deadline deadline,
                                   Clock::duration patience) EXCLUDES(mutex_);
  std::shared_ptr<Peer> remember(const EngineId& id, std::shared_ptr<Channel> channel, bool isOurs)
      REQUIRES(mutex_);
  Result<std::shared_ptr<Channel>> call(const EngineId& id, ByteView endpoint, Deadline deadline,
                                        const StopSignal* stop);
  void keepEndpoint(const EngineId& id, ByteView endpoint) REQUIRES(mutex_);
  void dropEndpoint(Peer& peer) REQUIRES(mutex_);
  bool isComing(const EngineId& id) const REQUIRES(mutex_);
  void collect() EXCLUDES(mutex_);
  void forgetUnderLock(const std::shared_ptr<Peer>& peer) REQUIRES(mutex_);

  EventLoop& loop_;
  Liveness& liveness_;
  const std::vector<std::unique_ptr<Transport>>& transports_;
  const Options options_;
  Mutex callMutex_;  // one callAll() at a time, so that no peer is called twice
  mutable Mutex mutex_;
  Condition arrived_;
  Clock::time_point lastArrival_ GUARDED_BY(mutex_);
  std::map<EngineId, std::shared_ptr<Peer>> peers_ GUARDED_BY(mutex_);
  // Forgotten or replaced in peers_.
  std::vector<std::shared_ptr<Peer>> lateWriters_ GUARDED_BY(mutex_);
  // Peers that are being called or forgotten. Only one thread at a time does so for a peer.
  std::set<EngineId> calling_ GUARDED_BY(mutex_);
  // Peers that were admitted but have no channel yet, and how long each is waited for.
  std::map<EngineId, Clock::time_point> admitted_ GUARDED_BY(mutex_);
  Counters counters_ GUARDED_BY(mutex_);  // without the numbers that counters() computes
  // Ends of peers that were seen before remember() got their channels.
  std::map<EngineId, Evidence> endedEarly_ GUARDED_BY(mutex_);
  // Endpoints of the peers that are connected or that connect() waits for.
  std::map<EngineId, Bytes> endpoints_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
