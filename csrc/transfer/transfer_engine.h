#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/stop_signal.h"
#include "engine/memory/gate.h"
#include "transfer/batch.h"
#include "transfer/directory.h"
#include "transfer/driver.h"
#include "transfer/errands.h"
#include "transfer/managed_pool.h"
#include "transfer/metadata.h"
#include "transfer/name_keeper.h"
#include "transfer/notifications.h"
#include "transfer/session_server.h"

namespace mooncake::transfer {

struct TransferEngineOptions {
  Env env;
  std::string localName;       // host, or host:port; empty: the first address that leads off it
  std::string host;            // where peers reach us; empty: the local name's
  std::string metadataServer;  // "P2PHANDSHAKE", "http://host:port/metadata"
  std::string protocol = "tcp";
  std::string devices;   // network cards to use, by name, separated by commas; empty: all
  uint16_t rpcPort = 0;  // 0: a free one
};

// What one engine holds at most.
struct TransferLimits {
  size_t transfers;         // under way at a time
  size_t ioThreads;         // that carry bulk data over TCP
  size_t registrations;     // of memory
  size_t batchedTransfers;  // of batches that are not released
};

// Reads and writes memory that other engines have registered, by their names. Any thread; a call
// blocks no longer than its deadline. Errors are codes, each with one line in the log.
class TransferEngine {
 public:
  // In a forked child what this gives refuses every call, and leaves everything alone at its end.
  static Result<std::shared_ptr<TransferEngine>> open(TransferEngineOptions options);
  ~TransferEngine();
  // Transfers under way are canceled; whoever is in a call returns. The first call counts.
  void close();

  const std::string& name() const { return directory_->name(); }  // what peers open
  const std::string& session() const { return session_; }         // host:port of ours
  uint16_t rpcPort() const { return rpcPort_; }
  const std::string& protocol() const { return protocol_; }
  Engine& engine() { return *engine_; }
  bool hasKey() const { return hasKey_; }
  TransferLimits limits() const;
  EngineCounters counters() const { return engine_->counters(); }
  // To one user at a time, who may connect and observe its peers: null where another one still has
  // it. `self` is this engine, and lives as long as what is given.
  std::shared_ptr<Engine> lend(const std::shared_ptr<TransferEngine>& self);
  const Env& env() const { return env_; }

  // ---- memory

  Code registerMemory(uint64_t address, uint64_t bytes, const std::string& location = "*",
                      bool isRemoteAccessible = true);
  Code unregisterMemory(uint64_t address);
  struct Range {
    uint64_t address;
    uint64_t bytes;
  };
  Code registerMemory(std::span<const Range> ranges, const std::string& location);  // all or none
  Code unregisterMemory(std::span<const uint64_t> addresses);  // all that can be; the first error
  uint64_t allocateManaged(uint64_t bytes);                    // 0: there is none
  Code freeManaged(uint64_t address, uint64_t bytes);
  bool holds(uint64_t address, uint64_t bytes) const { return bool(memory_->find(address, bytes)); }
  // Copies from or to registered memory of our own.
  Code writeHere(uint64_t address, ByteView bytes);
  Code readHere(uint64_t address, std::span<std::byte> bytes);

  // ---- peers

  // Null: the log says why, and `code` is it.
  std::shared_ptr<Segment> openSegment(const std::string& name, Code* code = nullptr);
  std::shared_ptr<Segment> segment(int32_t id) const { return directory_->find(id); }
  Code closeSegment(int32_t id) { return directory_->close(id); }
  Code refresh(Segment& segment);
  Code refreshSegments();
  // Nobody finds us by name any more.
  Code retract();
  // The live wire to each segment that is open.
  std::string describeLinks(bool asJson);
  uint64_t firstBuffer(const std::string& name);  // 0: it has none, or cannot be reached
  Code probe(const std::string& name);
  // Connects to its engine, and has each of our cards reach it: the first transfer waits for none
  // of that. Nothing is left to do where that has been done, and on wires without cards.
  Code warmUp(const std::string& name);
  // The live wire to it: "tcp", "fabric", "shm", "inproc", "local" for ourselves; empty: it cannot
  // be reached.
  std::string transportTo(const std::string& name);
  Code notify(const std::string& name, const Notification& notification);
  std::vector<Notification> takeNotifications();

  // ---- transfers

  // On this thread.
  Code transfer(std::span<const TransferRequest> requests);
  // Null: too many transfers wait. It stays until it is released.
  std::shared_ptr<Batch> allocateBatch(size_t capacity);
  // One thread at a time for each batch. All of them, or none is begun. The notification goes to
  // the first request's segment when all of the batch has ended well.
  Code submit(const std::shared_ptr<Batch>& batch, std::span<const TransferRequest> requests,
              std::optional<Notification> notification = std::nullopt);
  std::shared_ptr<Batch> batch(uint64_t id) const { return batches_.find(id); }
  // Until it is over: kGood, or kInvalid when one has failed.
  Code await(const Batch& batch);
  Code release(uint64_t id);

 private:
  // Whoever is in a call; false where that is refused.
  class Call;
  TransferEngine() = default;
  Status start(TransferEngineOptions options);
  Code fail(Code code, const std::string& what) const;
  Code add(Batch& batch, std::span<const TransferRequest> requests);
  void work();
  Status startWorkers();
  std::shared_ptr<const Bytes> describe();
  Deadline deadlineOf(uint64_t bytes) const;
  // Asked for anew when it has gone.
  Result<std::shared_ptr<Peer>> livePeer(Segment& segment);

  Env env_;
  TransferEnv settings_;
  std::string protocol_;
  std::string logName_;
  std::string session_;
  uint16_t rpcPort_ = 0;
  bool hasKey_ = false;
  uint32_t forkGeneration_ = 0;
  mutable Gate calls_;
  Interrupt stopping_;
  std::unique_ptr<StopSignal> closing_;  // ends what is asked of peers
  Doorbell ended_;
  BellPool bells_;
  // In the order in which they need each other; they go the other way round.
  std::unique_ptr<TransportContext> askContext_;
  std::unique_ptr<TransportContext> answerContext_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<RegisteredMemory> memory_;
  std::unique_ptr<ManagedPool> pool_;
  std::unique_ptr<Metadata> metadata_;
  std::unique_ptr<NameKeeper> keeper_;
  std::unique_ptr<Notifications> notifications_;
  std::unique_ptr<SegmentContext> segmentContext_;
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<SlotPool> slots_;
  std::unique_ptr<DriverContext> driverContext_;
  std::shared_ptr<SessionServer> server_;
  BatchTable batches_;
  TaskQueue queue_;
  Errands followUps_;
  static constexpr size_t kMostAskers = 8;
  Errands askers_{kMostAskers};  // what drivers ask of peers

  std::mutex mutex_;  // guards all below
  bool isClosed_ = false;
  std::vector<std::thread> workers_;
  std::set<Doorbell*> drivers_;
  std::weak_ptr<const void> lent_;
  std::shared_ptr<const Bytes> description_;
  uint64_t describedVersion_ = 0;
};

}  // namespace mooncake::transfer
