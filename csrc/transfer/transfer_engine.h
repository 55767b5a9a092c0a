#pragma once

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
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
#include "transfer/stream_transfers.h"

namespace mooncake::transfer {

struct TransferEngineOptions {
  EngineEnv env;
  std::string localName;       // host, or host:port; empty: the first address that peers can reach
  std::string host;            // where peers reach us; empty: the host of localName
  std::string metadataServer;  // "P2PHANDSHAKE", "http://host:port/metadata"
  std::string protocol = "tcp";
  std::string devices;   // network cards to use, by name, separated by commas; empty: all
  uint16_t rpcPort = 0;  // 0: a free one
};

// The limits of one engine.
struct TransferLimits {
  size_t transfers;         // under way at a time
  size_t ioThreads;         // for bulk data over TCP
  size_t registrations;     // of memory
  size_t batchedTransfers;  // in batches that are not released
};

// Reads and writes memory that other engines have registered, by name. Any thread. A call blocks no
// longer than its deadline. Errors are codes, and each logs one line.
class TransferEngine {
 public:
  // In a forked child the engine refuses every call, and its destructor changes nothing.
  static Result<std::shared_ptr<TransferEngine>> open(TransferEngineOptions options);
  ~TransferEngine();
  // Cancels transfers under way and makes callers return. Later calls do nothing.
  void close();

  const std::string& name() const { return directory_->name(); }  // the name that peers open
  const std::string& session() const { return session_; }         // host:port of our session port
  uint16_t rpcPort() const { return rpcPort_; }
  const std::string& protocol() const { return protocol_; }
  Engine& engine() { return *engine_; }
  bool hasKey() const { return hasKey_; }
  TransferLimits limits() const;
  EngineCounters counters() const { return engine_->counters(); }
  // Lends the Engine to one user at a time, which may connect to peers and observe them. Returns
  // null while another user holds it. `self` is this engine; the result keeps it alive.
  std::shared_ptr<Engine> lend(const std::shared_ptr<TransferEngine>& self);
  const EngineEnv& env() const { return env_; }

  // ---- memory

  Code registerMemory(uint64_t address, uint64_t bytes, const std::string& location = "*",
                      bool isRemoteAccessible = true);
  Code unregisterMemory(uint64_t address);
  struct Range {
    uint64_t address;
    uint64_t bytes;
  };
  Code registerMemory(std::span<const Range> ranges, const std::string& location);  // all or none
  Code unregisterMemory(std::span<const uint64_t> addresses);  // as many as possible; first error
  uint64_t allocateManaged(uint64_t bytes);                    // 0 on failure
  Code freeManaged(uint64_t address, uint64_t bytes);
  bool holds(uint64_t address, uint64_t bytes) const { return bool(memory_->find(address, bytes)); }
  // Copy from or to our own registered memory.
  Code writeHere(uint64_t address, ByteView bytes);
  Code readHere(uint64_t address, std::span<std::byte> bytes);

  // ---- peers

  // Returns null on failure: the log says why, and `*code` is the error.
  std::shared_ptr<Segment> openSegment(const std::string& name, Code* code = nullptr);
  std::shared_ptr<Segment> segment(int32_t id) const { return directory_->find(id); }
  Code closeSegment(int32_t id) { return directory_->close(id); }
  Code refresh(Segment& segment);
  Code refreshSegments();
  // Deletes our name, so that no new peer finds this engine by it.
  Code retract();
  // The live wire to each open segment.
  std::string describeLinks(bool asJson);
  uint64_t firstBuffer(const std::string& name);  // 0: it has none, or cannot be reached
  Code probe(const std::string& name);
  // Connects to the segment's engine, and lets each of our cards reach it, so that the first
  // transfer need not wait for that. Repeating it has no effect, nor has it one on wires without
  // cards.
  Code warmUp(const std::string& name);
  // The live wire to a segment: "tcp", "fabric", "shm", "inproc", or "local" for our own. Empty if
  // it cannot be reached.
  std::string transportTo(const std::string& name);
  Code notify(const std::string& name, const Notification& notification);
  std::vector<Notification> takeNotifications();

  // ---- transfers

  // Carries the transfers out on the calling thread.
  Code transfer(std::span<const TransferRequest> requests);
  // Returns null if too many transfers are in batches. The batch stays until release().
  std::shared_ptr<Batch> allocateBatch(size_t capacity);
  // Begins all requests, or none if one is invalid. One thread at a time for each batch. When the
  // whole batch has succeeded, the notification goes to the first request's segment.
  Code submit(const std::shared_ptr<Batch>& batch, std::span<const TransferRequest> requests,
              std::optional<Notification> notification = std::nullopt);
  // Enqueues the transfers on a stream of the device that owns the first request's buffer with an
  // owner: they begin when the stream comes there, and it goes on when they are over. If one of them
  // fails, the log says why, the stream goes on, and the next call returns an error.
  Status transferOnStream(void* stream, std::vector<TransferRequest> requests);
  std::shared_ptr<Batch> batch(uint64_t id) const { return batches_.find(id); }
  // Blocks until the batch is over: kGood, or kInvalid if a transfer has failed.
  Code await(const Batch& batch);
  Code release(uint64_t id);

 private:
  // Counts the callers inside the engine; converts to false if the call is refused.
  class Call;
  TransferEngine() = default;
  Status start(TransferEngineOptions options);
  Code fail(Code code, const std::string& what) const;
  std::shared_ptr<Batch> beginBatch(std::span<const TransferRequest> requests);
  Code add(Batch& batch, std::span<const TransferRequest> requests);
  void work() EXCLUDES(mutex_);
  Status startWorkers() EXCLUDES(mutex_);
  std::shared_ptr<const Bytes> describe() EXCLUDES(mutex_);
  Deadline deadlineOf(uint64_t bytes) const;
  // The segment's peer; if that is gone, asks for the segment's engine again.
  Result<std::shared_ptr<Peer>> livePeer(Segment& segment);

  EngineEnv env_;
  TransferEnv settings_;
  std::string protocol_;
  std::string logName_;
  std::string session_;
  uint16_t rpcPort_ = 0;
  bool hasKey_ = false;
  uint32_t forkGeneration_ = 0;
  mutable Gate calls_;
  Interrupt stopping_;
  std::unique_ptr<StopSignal> closing_;  // ends questions to peers
  Doorbell ended_;
  BellPool bells_;
  // Each member uses members above it, so they are destroyed in reverse order.
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
  StreamTransfers onStreams_{
      {.begin = [this](std::span<const TransferRequest> all) { return beginBatch(all); },
       .release = [this](const Batch& batch) { (void)batches_.release(batch.id); }}};
  std::unique_ptr<DriverContext> driverContext_;
  std::shared_ptr<SessionServer> server_;
  BatchTable batches_;
  TaskQueue queue_;
  Errands followUps_;
  static constexpr size_t kMostAskers = 8;
  Errands askers_{kMostAskers};  // run the drivers' questions to peers

  Mutex mutex_;
  bool isClosed_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_ GUARDED_BY(mutex_);
  std::set<Doorbell*> drivers_ GUARDED_BY(mutex_);
  std::weak_ptr<const void> lent_ GUARDED_BY(mutex_);
  std::shared_ptr<const Bytes> description_ GUARDED_BY(mutex_);
  uint64_t describedVersion_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake::transfer
