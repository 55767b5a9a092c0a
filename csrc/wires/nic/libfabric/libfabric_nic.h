#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "wires/nic/fabric_env.h"
#include "wires/nic/libfabric/endpoint.h"
#include "wires/nic/libfabric/link_state.h"
#include "wires/nic/libfabric/memory.h"
#include "wires/nic/libfabric/operations.h"
#include "wires/nic/libfabric/peers.h"

namespace mooncake {

// A card behind libfabric. Operations that the provider does not take at once wait here, per peer.
// So kExhausted always means "after a completion". Operations that the provider does not end within
// the time limit are ended here: providers over connections do not report a peer that is gone.
class LibfabricNic final : public Nic {
 public:
  static Result<std::unique_ptr<Nic>> open(std::shared_ptr<const LibfabricLibrary> library,
                                           FabricInfo info, const std::string& name,
                                           const FabricEnv& env, const MemoryPlaces& places);
  ~LibfabricNic() override;

  const std::string& name() const override { return name_; }
  const char* provider() const override { return provider_.c_str(); }
  const NicLimits& limits() const override { return limits_; }
  Bytes address() const override { return address_; }
  Result<NicPeer> insert(ByteView address) override;
  void remove(NicPeer peer) override;
  Result<std::unique_ptr<NicMemory>> registerMemory(std::span<std::byte> memory,
                                                    uint32_t access) override;
  Status send(NicPeer peer, NicBuffer header, NicBuffer body, void* context) override;
  Status receive(NicBuffer buffer, void* context) override;
  Status read(NicPeer peer, NicBuffer target, NicKey from, uint64_t offset, void* context) override;
  Status write(NicPeer peer, NicBuffer source, NicKey to, uint64_t offset, void* context) override;
  size_t poll(std::span<NicCompletion> into) override;
  void wait(Deadline deadline) override;
  void wake() override;
  NicSleep fallAsleep(Deadline deadline) override;
  void awake() override;
  void close() override;

 private:
  using State = NicOperation::State;
  using Kind = NicCompletion::Kind;

  LibfabricNic(std::unique_ptr<LibfabricEndpoint> endpoint, std::string name, const FabricEnv& env,
               const MemoryPlaces& places, Fd wake);

  Status begin(Kind kind, NicPeer peer, std::span<const NicBuffer> pieces, uint64_t remoteAddress,
               uint64_t remoteKey, void* context) EXCLUDES(mutex_);
  ssize_t give(NicOperation& operation) REQUIRES(mutex_);
  bool giveOrEnd(NicOperation& operation) REQUIRES(mutex_);  // false: the provider has no room
  void giveQueued() REQUIRES(mutex_);
  bool hasQueued() const REQUIRES(mutex_) {
    return !queuedPeers_.empty() || !queuedReceives_.empty();
  }

  // Not checked: the caller holds the lock if the provider is serialised, and else does not.
  size_t takeCompletions(std::span<NicCompletion> into) NOT_CHECKED;
  size_t takeEnded(std::span<NicCompletion> into) REQUIRES(mutex_);
  bool finish(const void* provider, NicCompletion& completion)
      REQUIRES(mutex_);  // false: no caller waits for it
  bool finishFailed(NicCompletion& completion) REQUIRES(mutex_);
  void end(NicOperation& operation, NicError error, int providerError, bool isLeftBehind = false)
      REQUIRES(mutex_);
  void leave(NicOperation& operation) REQUIRES(mutex_);

  void advanceClock() REQUIRES(mutex_);
  void giveUpOverdue() REQUIRES(mutex_);
  void giveUpAll(NicError error, int providerError) REQUIRES(mutex_);
  bool isOverdue(const NicOperation& operation) REQUIRES(mutex_);
  NicError errorFor(const NicOperation& operation, NicError error) REQUIRES(mutex_);
  size_t countUnderWay() const REQUIRES(mutex_) { return transmits_.inUse() - abandoned_; }
  void wakeLongSleeper() REQUIRES(mutex_);

  const std::string name_;
  const std::string provider_;
  const std::chrono::nanoseconds timeout_;
  const LinkState link_;
  const bool isSerialised_;  // the provider allows one calling thread at a time
  NicLimits limits_;
  Bytes address_;
  Fd wake_;

  Mutex mutex_;  // also held around each call into a serialised provider
  std::unique_ptr<LibfabricEndpoint> endpoint_ GUARDED_BY(mutex_);  // null: closed
  std::shared_ptr<LibfabricMemories> memories_;
  NicOperations transmits_ GUARDED_BY(mutex_);
  NicOperations receives_ GUARDED_BY(mutex_);
  NicPeers peers_ GUARDED_BY(mutex_);
  std::vector<NicPeer> queuedPeers_ GUARDED_BY(mutex_);
  std::deque<NicOperation*> queuedReceives_ GUARDED_BY(mutex_);
  // Completions that the provider did not give.
  std::vector<NicCompletion> ended_ GUARDED_BY(mutex_);
  size_t abandoned_ GUARDED_BY(mutex_) = 0;
  bool isLinkDown_ GUARDED_BY(mutex_) = false;
  // Own clock, in ns. Stands still while no thread polls, so time in which the process was stopped
  // does not count.
  uint64_t clock_ GUARDED_BY(mutex_) = 0;
  Clock::time_point lastTick_ GUARDED_BY(mutex_) = Clock::now();
  uint64_t nextCheck_ GUARDED_BY(mutex_) = 0;
  bool sleepsLong_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> isWoken_{false};

  std::chrono::nanoseconds nap_{0};  // used by the polling thread only
  Clock::time_point lastFound_ = Clock::now();
};

}  // namespace mooncake
