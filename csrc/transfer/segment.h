#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"
#include "transfer/errands.h"
#include "transfer/metadata.h"
#include "transfer/registered_memory.h"
#include "transfer/segment_description.h"
#include "transfer/slot_pool.h"

namespace mooncake::transfer {

// The parts of an engine that its segments use. Outlives the segments.
struct SegmentContext {
  const TransportContext& session;  // for askSession()
  Engine& engine;
  RegisteredMemory& memory;
  const Metadata& metadata;
  const StopSignal& closing;
  std::chrono::milliseconds patience;  // longest wait for a peer's description
};

// An engine's description of itself, and the session port that it came from.
struct NamedAnswer {
  std::string session;
  SegmentDescription description;
};

// Asks the engine that a name leads to. kPeerLost: that engine has ended, even if another one
// listens at its port now.
Result<NamedAnswer> askByName(const SegmentContext& context, const std::string& name,
                              const Question& question, Deadline deadline);

// The registered memory of the engine with this name, as this process knows it. The peer is asked
// at first use. It is asked again when it refuses a transfer, or when another engine has its name.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  Segment(const SegmentContext& context, std::string name, int32_t id, bool isOurs)
      : context_(context), name_(std::move(name)), id_(id), isOurs_(isOurs) {}

  const std::string& name() const { return name_; }
  int32_t id() const { return id_; }
  void setId(int32_t id) { id_ = id; }  // only before other threads see the segment
  bool isOurs() const { return isOurs_; }
  SlotShare& slots() { return slots_; }

  struct Place {
    std::shared_ptr<Peer> peer;  // null: the memory is our own
    RemoteRegion region;
    uint64_t offset = 0;
    uint64_t generation = 0;  // of the description that this came from
  };
  // kRefused: no known registration holds the whole range with this right.
  Result<Place> locate(uint64_t address, uint64_t bytes, uint32_t right, Deadline deadline);
  // Asks the peer again, unless another call has replaced the description of that generation.
  Status refresh(uint64_t generation, Deadline deadline);
  // Runs refresh() on a thread of `errands`, once for all callers that ask meanwhile, and rings
  // each caller's bell when it is done. A shared pointer must own the segment. The bells must
  // outlive the errands.
  class Asking;
  std::shared_ptr<Asking> refreshSoon(uint64_t generation, Deadline deadline, Errands& errands,
                                      Doorbell& bell);
  Result<std::shared_ptr<Peer>> peer(Deadline deadline);
  // Address of the buffer that the peer registered first; 0 if it has none. Asks the peer again.
  Result<uint64_t> firstBuffer(Deadline deadline);
  // All registrations of the peer, as far as known.
  Result<std::vector<RemoteRegion>> regions(Deadline deadline);
  uint64_t generation() const;
  // Asks the connected peer, which needs no metadata server. Empty if no peer is connected, or if
  // it no longer is the engine of this name.
  std::optional<NamedAnswer> askStandingPeer(const Question& question, Deadline deadline) const;

 private:
  struct Known {
    std::string session;         // the peer's session port
    std::shared_ptr<Peer> peer;  // null: this process
    std::vector<RemoteBuffer> inOrder;
    std::map<uint64_t, const RemoteBuffer*> byAddress;
    uint64_t generation = 0;
  };
  using KnownPtr = std::shared_ptr<const Known>;
  Result<KnownPtr> known(Deadline deadline) EXCLUDES(mutex_);
  Result<KnownPtr> ask(Deadline deadline) EXCLUDES(mutex_);
  Result<Place> locateHere(uint64_t address, uint64_t bytes, uint32_t right) const;

  const SegmentContext& context_;
  const std::string name_;
  int32_t id_;
  const bool isOurs_;
  SlotShare slots_;
  mutable Mutex mutex_;
  Condition asked_;
  bool isAsking_ GUARDED_BY(mutex_) = false;  // one ask() at a time
  KnownPtr known_ GUARDED_BY(mutex_);
  std::shared_ptr<Asking> soon_ GUARDED_BY(mutex_);  // the refreshSoon() under way, or null
};

class Segment::Asking {
 public:
  explicit Asking(uint64_t generation) : generation_(generation) {}
  bool isDone() const { return isDone_.load(std::memory_order_acquire); }
  const Status& answer() const { return answer_; }  // valid once isDone()

 private:
  friend class Segment;
  const uint64_t generation_;  // of the description that it replaces
  Status answer_;              // written before isDone_
  std::atomic<bool> isDone_{false};
  std::vector<Doorbell*> bells_;  // guarded by the segment
};

}  // namespace mooncake::transfer
