#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/crypto.h"
#include "base/event_loop.h"
#include "base/mutex.h"
#include "base/result.h"
#include "base/stop_signal.h"
#include "base/wait.h"
#include "engine/connections.h"
#include "engine/contract/evidence.h"
#include "engine/contract/transport.h"
#include "engine/env.h"
#include "engine/memory/arena.h"
#include "engine/memory/lease_table.h"
#include "engine/memory/message_pools.h"
#include "engine/memory/region_table.h"
#include "engine/memory/retired_memory.h"
#include "engine/peers/farewells.h"
#include "engine/peers/last_words.h"
#include "engine/peers/liveness.h"
#include "engine/peers/message_router.h"
#include "engine/peers/outbox.h"
#include "engine/peers/peer.h"
#include "engine/peers/reconnector.h"

namespace mooncake {

struct EngineOptions {
  EngineEnv env;
  Bytes jobKey;         // the job's key; every connection starts with a mutual challenge under it
  std::string logName;  // this engine's name in the log, such as "rank 3"
  // Address space of the arena, of which only touched pages take memory, unless the environment says
  // another size. 0: usualArenaBytes().
  size_t arenaBytes = 0;
  // Number of threads for TCP connections that carry bulk data. 0: the engine's one thread does it.
  size_t dataThreads = 0;
  // If true, open() may connect again to a peer whose channel has ended. The ranks of a group set
  // this to false, because they conclude from the end of a channel that the peer is lost.
  bool peersReturn = false;
  // A peer's connections beyond its first end after this long without traffic. The record of a lost
  // peer is dropped after this long. Both are checked twice in that time. 0: never.
  std::chrono::milliseconds idleAfter{0};
  // A connection counts as broken when the peer's kernel has answered nothing for this long. 0: no
  // limit here, because liveness reports silent peers to the observer.
  std::chrono::milliseconds deadAfter{0};
};

// Returns 64 GiB, or less if the process's address space or files are limited: see RLIMIT_AS and
// RLIMIT_FSIZE in getrlimit(2).
size_t usualArenaBytes();

// The key of engines that have no key of their own. It is publicly known, so it keeps no peer out.
// Engine::create() logs a warning about it.
Bytes publicKey();

// Counts what an engine has done, and what exists now.
struct EngineCounters {
  uint64_t opened = 0;        // channels opened, called or accepted
  uint64_t reused = 0;        // calls of open() answered with an existing channel
  uint64_t active = 0;        // peers that are connected
  uint64_t pending = 0;       // calls under way
  uint64_t retries = 0;       // calls after the first one for a channel, and reconnections
  uint64_t connections = 0;   // open now, of all peers
  uint64_t addresses = 0;     // of peers, kept for reconnecting
  uint64_t collected = 0;     // idle connections ended, and records of lost peers dropped
  uint64_t messages = 0;      // taken by send()
  uint64_t messageBytes = 0;  // of these messages
  uint64_t bytesRead = 0;     // of successful transfers, as far as countRead() was told
  uint64_t bytesWritten = 0;
  CardCounters byCards;  // of all that network cards move, collectives included
};

// One rank's door to the memory of other ranks. A process may hold many. engine.cc creates and
// destroys it, engine_evidence.cc handles evidence about peers.
class Engine {
 public:
  static Result<std::shared_ptr<Engine>> create(EngineOptions options);
  ~Engine();

  const EngineId& id() const { return context_->id; }
  const EngineEnv& env() const { return options_.env; }
  const std::string& logName() const { return options_.logName; }
  Arena& arena() { return *arena_; }
  // The arena, for users that keep its memory longer than the engine.
  const std::shared_ptr<Arena>& sharedArena() const { return arena_; }
  LeaseTable& leases() { return *leases_; }
  RegionTable& regions() { return regions_; }
  EventLoop& loop() { return *loop_; }
  MessagePools& messagePools() { return *messagePools_; }

  // Returns the address that a peer needs to connect to this engine, over all of its transports.
  Bytes endpoint() const;
  // Connects to all these endpoints. A peer that has connected before is returned as it is, even if
  // it is disconnected by now. Our own endpoint gives null. Of each pair, the engine with the
  // smaller id calls. If its call does not come, the other one calls, too. Blocks until all are
  // connected, one refuses, or the deadline passes. The error names a missing peer by its index,
  // and the reason. A peer that has no name yet is named by its index. Starts the liveness thread,
  // which sleeps until all have connected to all.
  Result<std::vector<std::shared_ptr<Peer>>> connect(const std::vector<Bytes>& endpoints,
                                                     Deadline deadline) {
    auto peers = connections_->connect(endpoints, deadline);
    if (peers.ok()) watchSoon();
    return peers;
  }

  // Connects to one peer, by this side alone: the other engine need not know of us. Any thread. A
  // connected peer is returned as it is. Two engines that open each other at once end up with one
  // channel. A peer whose channel has ended is called again, and is a new Peer object then. `name`
  // is for the log. Blocks until the channel is open, the deadline passes, or `stop` is set
  // (kAborted). Our own endpoint gives null.
  Result<std::shared_ptr<Peer>> open(ByteView endpoint, std::string name, Deadline deadline,
                                     const StopSignal* stop = nullptr) {
    return connections_->open(endpoint, std::move(name), deadline, stop);
  }
  // Says goodbye, closes the channel, and drops the peer. Not on a callback's thread.
  // kTimeout: another thread was still calling the peer, and nothing has changed.
  Status forget(const std::shared_ptr<Peer>& peer, Deadline deadline) {
    return connections_->forget(peer, deadline);
  }
  // The same, on the loop's thread, and tried again until it succeeds.
  void forgetSoon(const std::shared_ptr<Peer>& peer);
  // Returns the latest object of a peer that has been connected, or null. Any thread.
  std::shared_ptr<Peer> find(const EngineId& id) const { return connections_->find(id); }
  // Returns the number of peers that have not been forgotten.
  size_t peers() const { return connections_->all().size(); }
  // Returns the endpoint of a connected peer; empty: it is not known, as that of a peer that has
  // called us, unless keepEndpoint() told it. Any thread.
  Bytes endpointOf(const EngineId& id) const { return connections_->endpointOf(id); }
  // Also of a peer that is disconnected or forgotten.
  Bytes endpointOf(const Peer& peer) const { return connections_->endpointOf(peer); }
  void keepEndpoint(const EngineId& id, ByteView endpoint, const std::string& name) {
    connections_->noteEndpoint(id, endpoint, name);
  }
  // Returns the peers for which Peer::hasLateWrites() is true, forgotten ones included. Memory that
  // they could write to must not be reused until this returns none of them.
  std::vector<std::shared_ptr<Peer>> lateWriters() { return connections_->lateWriters(); }
  EngineCounters counters() const;
  // Returns the number of network cards that the engine has opened; 0 without any.
  size_t cardCount() const;
  // Add to the bytes that counters() returns.
  void countRead(uint64_t bytes) { bytesRead_.fetch_add(bytes, std::memory_order_relaxed); }
  void countWritten(uint64_t bytes) { bytesWritten_.fetch_add(bytes, std::memory_order_relaxed); }

  // Returns memory of the arena: Arena::allocate(). Without room, waits for retired memory, at most
  // for the failure timeout. A program destroys an object on all ranks and makes the next one, and
  // the ranks are not equally fast in that.
  Result<ArenaBlock> allocate(size_t bytes) {
    return retired_.allocate(*arena_, bytes, Deadline::after(options_.env.failureTimeout));
  }
  // Keeps the memory until `isFree` returns true, that is, until no peer touches it any more.
  // `isFree` is called whenever memory is retired or allocated.
  void retire(std::vector<RetiredMemory> memory, std::function<bool()> isFree) {
    retired_.retire(std::move(memory), std::move(isFree));
  }

  // Messages between the users of a job's engines; each names a topic
  // (engine/peers/message_router.h). The handler runs on the loop's thread, without a lock, and
  // must not own the engine.
  using OnMessage = MessageRouter::OnMessage;
  void openTopic(uint64_t topic, OnMessage handler) { topics_->open(topic, std::move(handler)); }
  void closeTopic(uint64_t topic) { topics_->close(topic); }

  // Sends 1 byte to MessageRouter::kMostBytes. Any thread; makes no system call, so threads that
  // must not block may call it. Messages to one peer arrive in the order of the calls. A message is
  // lost if the connection breaks (see observe()), or if the channel refuses it because 256 MiB
  // wait. It is also lost if the socket has not taken it at leave(). After an error nothing was
  // sent: kPeerLost, or kExhausted while the loop is far behind.
  Status send(Peer& peer, uint64_t topic, ByteView message);
  Status send(const EngineId& to, uint64_t topic, ByteView message);
  // For a sender that ends, and hears of no later reconnection: sends these messages to a peer once
  // more when its connection was made again. The sender still sends them itself, after this call or
  // while it hears of reconnections. They are kept for four failure timeouts after they were sent
  // last, and at most 4 MiB of them (engine/peers/last_words.h). Any thread.
  void keepLastWords(const std::vector<std::shared_ptr<Peer>>& to, uint64_t topic,
                     std::vector<Bytes> messages);

  // Sets the observer of evidence: ends of peers, and signs of an end. It runs on the loop's
  // thread, without a lock. All peers that one look finds silent come in one call. Ends seen
  // earlier are reported at once. Null: no observer. When this returns, the earlier observer is not
  // called any more. The observer must not own the engine.
  //
  // If a connection breaks while its other end still listens, it is made again within the failure
  // timeout. That is no evidence. Puts and messages that had not arrived are lost. Gets under way
  // end with kPeerLost, as do requests made before the reconnection. `reconnected` runs at both
  // ends, after the last loss: repeat important puts and messages there.
  using OnEvidence =
      std::function<void(const std::vector<EngineId>& peers, const Evidence& evidence)>;
  using OnReconnected = std::function<void(const EngineId& peer)>;
  void observe(OnEvidence observer, OnReconnected reconnected = nullptr);

  // Sets the last report of this engine, which its peers read after our end. Peers on this host
  // find it in our crash report (Peer::lastReport), however we end. leave() sends it to the other
  // peers, to `topic`, before the goodbye. One thread at a time.
  Status publish(uint64_t topic, ByteView message);

  // Call it when all peers have connected to all. Peers without heartbeats count as silent from now
  // on.
  void startSilenceDetection();
  // Call it when an operation begins that the death of a peer would block. Any thread; costs a
  // load.
  void markActive() { liveness_->markActive(); }

  // Says goodbye and `farewell` to all peers, and closes the channels. Earlier puts still arrive;
  // the observer is not called any more. Waits for connections that are being made again, except on
  // the loop's thread. Only the first call counts.
  void leave(const Farewell& farewell = {});

  // When a peer ends, the interrupt is bumped and the bell rung. unwatch() ends one watch().
  void watch(Interrupt* interrupt, Doorbell* bell);
  void unwatch(Interrupt* interrupt);

 private:
  Engine() = default;
  void onEnded(const EngineId& id, const Evidence& seen) EXCLUDES(mutex_);
  void onExited(const EngineId& id, const std::string& how);
  void onSilent(const std::vector<Liveness::Silent>& silent);
  void onBroken(const EngineId& id, const Evidence& evidence);
  void onReconnected(const EngineId& id, const std::optional<Evidence>& how);
  void tell(const std::vector<EngineId>& peers, const Evidence& evidence);
  void watchSoon();
  void beginLiveness();

  EngineOptions options_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<LeaseTable> leases_;
  RegionTable regions_;
  std::unique_ptr<TransportContext> context_;
  Mutex mutex_;
  std::vector<std::pair<Interrupt*, Doorbell*>> watchers_ GUARDED_BY(mutex_);
  uint64_t publishedFor_ GUARDED_BY(mutex_) = 0;  // the topic; 0: nothing is published
  Bytes published_ GUARDED_BY(mutex_);

  // Used on the loop's thread only.
  OnEvidence observer_;
  OnReconnected reconnected_;
  Farewells farewells_;

  std::atomic<bool> hasLeft_{false};
  std::atomic<uint64_t> bytesRead_{0}, bytesWritten_{0};

  std::unique_ptr<MessageRouter> topics_;              // the loop uses it until the loop ends
  std::unique_ptr<Outbox> outbox_;                     // the loop uses it until the loop ends
  std::unique_ptr<LastWords> lastWords_;               // the loop uses it until the loop ends
  std::unique_ptr<Reconnector> reconnector_;           // the loop uses it until the loop ends
  std::vector<std::unique_ptr<EventLoop>> dataLoops_;  // go after the loop has stopped
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<MessagePools> messagePools_;  // go after the loop has stopped
  std::unique_ptr<Liveness> liveness_;          // the loop uses it until the loop ends
  std::vector<std::unique_ptr<Transport>> transports_;
  std::unique_ptr<Connections> connections_;  // the loop uses it until the loop ends
  RetiredBlocks retired_;
};

}  // namespace mooncake
