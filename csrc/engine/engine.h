#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/crypto.h"
#include "base/env.h"
#include "base/event_loop.h"
#include "base/result.h"
#include "base/stop_signal.h"
#include "base/wait.h"
#include "engine/evidence.h"
#include "engine/liveness.h"
#include "engine/memory/arena.h"
#include "engine/memory/lease_table.h"
#include "engine/memory/region_table.h"
#include "engine/message_router.h"
#include "engine/outbox.h"
#include "engine/peer.h"
#include "engine/reconnector.h"
#include "engine/transports/transport.h"

namespace mooncake {

struct EngineOptions {
  Env env;
  Bytes jobKey;         // of the job; every connection starts with a mutual challenge under it
  std::string logName;  // "rank 3": how this engine calls itself in the log
  size_t arenaBytes = size_t(4) << 30;  // address space, not memory
  // Threads for what carries bulk data over TCP; none: the engine's one thread does it all.
  size_t dataThreads = 0;
  // A peer whose channel has ended may begin another, by open(). Who draws conclusions from ends
  // (a group's ranks) does not want that.
  bool peersReturn = false;
  // Connections beside a peer's first that carry nothing for this long end, and so does what is
  // kept of a peer that has been gone for as long; looked at twice in that time. 0: never.
  std::chrono::milliseconds idleAfter{0};
  // A connection over which the peer's kernel answers nothing for so long counts as broken. 0: for
  // whoever observes, liveness finds out.
  std::chrono::milliseconds deadAfter{0};
};

// The key of engines that have none: known to everybody, so it keeps nobody out. Said in the log.
Bytes publicKey();

// What an engine has done, and what is there now.
struct EngineCounters {
  uint64_t opened = 0;       // channels that stood up, called or accepted
  uint64_t reused = 0;       // answers of open() with a channel that stood already
  uint64_t active = 0;       // peers that are connected
  uint64_t pending = 0;      // calls under way
  uint64_t retries = 0;      // calls after the first one for a channel, and channels made again
  uint64_t connections = 0;  // that stand, of all peers
  uint64_t addresses = 0;    // of peers, kept to make their connections again
  uint64_t collected = 0;    // connections that were idle, and peers that were gone
  uint64_t bytesRead = 0;    // by transfers that ended well, where somebody counts them
  uint64_t bytesWritten = 0;
  CardCounters byCards;  // of all that is moved, also for collectives
};

// Memory that peers may still touch after its owner is done with it.
struct RetiredMemory {
  ArenaBlock block;
  MemoryRegion region;  // ends before the block
};

// One rank's door to the memory of other ranks. A process may hold many. How it begins and ends is
// in engine.cc, connect() in engine_connect.cc, open() and forget() in engine_open.cc, and what is
// seen of peers in engine_evidence.cc.
class Engine {
 public:
  static Result<std::shared_ptr<Engine>> create(EngineOptions options);
  ~Engine();

  const EngineId& id() const { return context_->id; }
  const Env& env() const { return options_.env; }
  const std::string& logName() const { return options_.logName; }
  Arena& arena() { return *arena_; }
  // For whoever keeps memory of it longer than the engine.
  const std::shared_ptr<Arena>& sharedArena() const { return arena_; }
  LeaseTable& leases() { return *leases_; }
  RegionTable& regions() { return regions_; }
  EventLoop& loop() { return *loop_; }

  // What a peer needs to connect to this engine, over all of its transports.
  Bytes endpoint() const;
  // Connects to all these endpoints; a peer that is already connected is returned as it is, also
  // one that is disconnected since, our own endpoint gives null. Of each pair the engine with the
  // smaller id calls and the other one is called; where no call comes, the other one calls, too.
  // Blocks until all are there, one refuses, or the deadline has passed; the error names a missing
  // peer by its index, and why. The index is also the name of a peer that has none yet. Starts the
  // liveness thread, which sleeps until all have connected to all.
  Result<std::vector<std::shared_ptr<Peer>>> connect(const std::vector<Bytes>& endpoints,
                                                     Deadline deadline);

  // One peer, by this side alone: the other engine need not know of us. Any thread. Whoever is
  // connected is returned as it is; two that open each other at once end up with one channel. A
  // peer whose channel has ended is called anew, and is another object then. The name is for the
  // log. Blocks until the channel stands, at most until the deadline or `stop` (kAborted); our own
  // endpoint gives null.
  Result<std::shared_ptr<Peer>> open(ByteView endpoint, std::string name, Deadline deadline,
                                     const StopSignal* stop = nullptr);
  // Says goodbye, closes the channel, and knows the peer no more. On any thread but those of a
  // callback. kTimeout, and nothing is changed: another thread was still calling it.
  Status forget(const std::shared_ptr<Peer>& peer, Deadline deadline);
  // Those for whom Peer::hasLateWrites() is true, also when they are forgotten. What they could
  // write to must not serve anything else until it is true for none of them.
  std::vector<std::shared_ptr<Peer>> lateWriters();
  EngineCounters counters() const;
  // For its counters: so much has been moved.
  void countRead(uint64_t bytes) { bytesRead_.fetch_add(bytes, std::memory_order_relaxed); }
  void countWritten(uint64_t bytes) { bytesWritten_.fetch_add(bytes, std::memory_order_relaxed); }

  // Keeps the memory until nobody touches it any more, as `isFree` says; that is asked whenever
  // more is retired.
  void retire(std::vector<RetiredMemory> memory, std::function<bool()> isFree);

  // Messages between those who run the engines of a job; each names a topic
  // (engine/message_router.h). The handler runs on the loop's thread, without a lock, and must not
  // own the engine.
  using OnMessage = MessageRouter::OnMessage;
  void openTopic(uint64_t topic, OnMessage handler) { topics_->open(topic, std::move(handler)); }
  void closeTopic(uint64_t topic) { topics_->close(topic); }

  // 1 byte to MessageRouter::kMostBytes. Any thread; waits for no system call, so also those that
  // must not be held up. To one peer messages arrive in the order of the calls. They are lost with
  // the connection (see observe()), also what its socket has not taken yet when we leave(), and
  // when the channel does not take them (256 MiB wait). An error says that nothing was sent:
  // kPeerLost, or kExhausted while the loop is far behind.
  Status send(Peer& peer, uint64_t topic, ByteView message);
  Status send(const EngineId& to, uint64_t topic, ByteView message);

  // Whoever draws conclusions from what is seen of the peers: their ends, and what may be one. On
  // the loop's thread, without a lock; all that one look found silent come together. Ends that were
  // seen before are told at once. Null: nobody; the one before is not called any more when this
  // returns. It must not own the engine.
  //
  // A connection that breaks while something listens at its other end is made again, for as long as
  // the failure timeout: that is no evidence. Puts and messages that had not arrived are lost then,
  // and gets under way have ended with kPeerLost, as does what is asked meanwhile. `reconnected`
  // comes at both ends, after the last loss: it is the place to put and send again what matters.
  using OnEvidence =
      std::function<void(const std::vector<EngineId>& peers, const Evidence& evidence)>;
  using OnReconnected = std::function<void(const EngineId& peer)>;
  void observe(OnEvidence observer, OnReconnected reconnected = nullptr);

  // What the peers shall know of us when we have ended: those on the host find it in our crash
  // report (Peer::lastReport) however we end, and leave() sends it to the others, to that topic,
  // before the goodbye. One thread at a time.
  Status publish(uint64_t topic, ByteView message);

  // All peers have connected to all. From now on, peers without heartbeats count as silent.
  void startSilenceDetection();
  // Something has begun that the death of a peer would hold up. Any thread; costs a load.
  void markActive() { liveness_->markActive(); }

  // Says goodbye to all peers, and how we leave, and closes the channels. What was put before still
  // arrives; the observer is told nothing more. A connection that is just being made again is
  // waited for, not so on the loop's thread. The first call counts.
  void leave(const Farewell& farewell = {});

  // The end of a peer bumps the interrupt and rings the bell.
  void watch(Interrupt* interrupt, Doorbell* bell);
  void unwatch(Interrupt* interrupt);

 private:
  Engine() = default;
  std::shared_ptr<Peer> known(const EngineId& id) const;
  Result<std::vector<std::shared_ptr<Peer>>> connectAll(const std::vector<EngineId>& ids,
                                                        const std::vector<Bytes>& endpoints,
                                                        Deadline deadline);
  Status callAll(const std::vector<EngineId>& ids, const std::vector<Bytes>& endpoints,
                 std::vector<size_t> wanted, Deadline deadline);
  std::vector<size_t> awaitCallers(const std::vector<EngineId>& ids, Deadline deadline,
                                   Clock::duration patience);
  std::shared_ptr<Peer> remember(const EngineId& id, std::shared_ptr<Channel> channel, bool isOurs);
  Result<std::shared_ptr<Channel>> call(const EngineId& id, ByteView endpoint, Deadline deadline,
                                        const StopSignal* stop);
  void keepEndpoint(const EngineId& id, ByteView endpoint);
  bool admits(const EngineId& id);
  bool isComing(const EngineId& id) const;
  void collect();
  void onAccepted(const EngineId& id, std::shared_ptr<Channel> channel);
  void onEnded(const EngineId& id, const Evidence& seen);
  void onExited(const EngineId& id, const std::string& how);
  void onSilent(const std::vector<Liveness::Silent>& silent);
  void onBroken(const EngineId& id, const Evidence& evidence);
  void onReconnected(const EngineId& id, const std::optional<Evidence>& how);
  void runOnLoop(std::function<void()> task);
  void forgetUnderLock(const std::shared_ptr<Peer>& peer);
  void tell(const std::vector<EngineId>& peers, const Evidence& evidence);
  void hearFarewells();
  void watchSoon();
  void beginLiveness();
  void onFarewell(const EngineId& from, ByteView message);
  Evidence withFarewell(const EngineId& id, const Evidence& evidence) const;

  EngineOptions options_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<LeaseTable> leases_;
  RegionTable regions_;
  std::unique_ptr<TransportContext> context_;
  std::mutex callMutex_;      // one callAll() at a time: nobody is called twice
  mutable std::mutex mutex_;  // guards everything below down to published_
  std::condition_variable arrived_;
  Clock::time_point lastArrival_;
  std::map<EngineId, std::shared_ptr<Peer>> peers_;
  std::vector<std::shared_ptr<Peer>> lateWriters_;  // that are not among them any more
  // Whom we are calling, or forgetting: one thread at a time.
  std::set<EngineId> calling_;
  // Who has been let in and is not there yet, and until when we wait for it.
  std::map<EngineId, Clock::time_point> admitted_;
  EngineCounters counters_;  // but for what is counted elsewhere, or when asked
  // Of peers that ended before remember() had their channels in its hands.
  std::map<EngineId, Evidence> endedEarly_;
  // Where a peer listens: while it is connected, or connect() waits for it.
  std::map<EngineId, Bytes> endpoints_;
  std::vector<std::pair<Interrupt*, Doorbell*>> watchers_;
  uint64_t publishedFor_ = 0;  // the topic; 0: nothing is published
  Bytes published_;

  // Of the loop's thread alone.
  OnEvidence observer_;
  OnReconnected reconnected_;
  std::map<EngineId, Farewell> farewells_;  // of those whose goodbye may come now

  std::atomic<bool> hasLeft_{false};
  std::atomic<uint64_t> bytesRead_{0}, bytesWritten_{0};

  std::unique_ptr<MessageRouter> topics_;              // the loop uses it until the loop ends
  std::unique_ptr<Outbox> outbox_;                     // the loop uses it until the loop ends
  std::unique_ptr<Reconnector> reconnector_;           // the loop uses it until the loop ends
  std::vector<std::unique_ptr<EventLoop>> dataLoops_;  // go after the loop has stopped
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Liveness> liveness_;  // the loop uses it until the loop ends
  std::vector<std::unique_ptr<Transport>> transports_;

  struct Retired {
    std::vector<RetiredMemory> memory;
    std::function<bool()> isFree;
  };
  std::mutex retiredMutex_;  // guards retired_
  std::vector<Retired> retired_;
};

}  // namespace mooncake
