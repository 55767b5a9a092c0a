#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transfer/errands.h"
#include "transfer/metadata.h"
#include "transfer/registered_memory.h"
#include "transfer/segment_description.h"
#include "transfer/slot_pool.h"

namespace mooncake::transfer {

// What segments need of the engine that they belong to. Outlives them.
struct SegmentContext {
  const TransportContext& session;  // for askSession()
  Engine& engine;
  RegisteredMemory& memory;
  const Metadata& metadata;
  const StopSignal& closing;
  std::chrono::milliseconds patience;  // with a peer that is asked who it is
};

// What an engine says of itself, and the session port where it said so.
struct NamedAnswer {
  std::string session;
  SegmentDescription description;
};

// Asks the engine to which a name leads. kPeerLost: it has ended, also where another engine listens
// at its port now.
Result<NamedAnswer> askByName(const SegmentContext& context, const std::string& name,
                              const Question& question, Deadline deadline);

// The memory that an engine has registered, under a name, as we know it: asked for at first use and
// kept, asked for once more when the peer refuses what we know, or is another engine by now.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  Segment(const SegmentContext& context, std::string name, int32_t id, bool isOurs)
      : context_(context), name_(std::move(name)), id_(id), isOurs_(isOurs) {}

  const std::string& name() const { return name_; }
  int32_t id() const { return id_; }
  void setId(int32_t id) { id_ = id; }  // before others see it
  bool isOurs() const { return isOurs_; }
  SlotShare& slots() { return slots_; }

  struct Place {
    std::shared_ptr<Peer> peer;  // null: it is our own memory
    RemoteRegion region;
    uint64_t offset = 0;
    uint64_t generation = 0;  // of what we know
  };
  // kRefused: nothing that we know holds the whole range, or not with this right.
  Result<Place> locate(uint64_t address, uint64_t bytes, uint32_t right, Deadline deadline);
  // Unless somebody has since that generation.
  Status refresh(uint64_t generation, Deadline deadline);
  // The same on a thread for it, once for all that ask meanwhile; each bell is rung when it is
  // done. Of a segment that a shared pointer owns. The bells outlive the engine's errands.
  class Asking;
  std::shared_ptr<Asking> refreshSoon(uint64_t generation, Deadline deadline, Errands& errands,
                                      Doorbell& bell);
  Result<std::shared_ptr<Peer>> peer(Deadline deadline);
  // 0: it has none.
  Result<uint64_t> firstBuffer(Deadline deadline);
  // All that it has registered, as we know it.
  Result<std::vector<RemoteRegion>> regions(Deadline deadline);
  uint64_t generation() const;
  // Asks the peer that stands connected, which needs no metadata server. Empty: there is none, or
  // it is not the engine of this name any more.
  std::optional<NamedAnswer> askStandingPeer(const Question& question, Deadline deadline) const;

 private:
  struct Known {
    std::string session;         // where the peer answers questions
    std::shared_ptr<Peer> peer;  // null: it is we
    std::vector<RemoteBuffer> inOrder;
    std::map<uint64_t, const RemoteBuffer*> byAddress;
    uint64_t generation = 0;
  };
  using KnownPtr = std::shared_ptr<const Known>;
  Result<KnownPtr> known(Deadline deadline);
  Result<KnownPtr> ask(Deadline deadline);
  Result<Place> locateHere(uint64_t address, uint64_t bytes, uint32_t right) const;

  const SegmentContext& context_;
  const std::string name_;
  int32_t id_;
  const bool isOurs_;
  SlotShare slots_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable asked_;
  bool isAsking_ = false;  // one ask() at a time
  KnownPtr known_;
  std::shared_ptr<Asking> soon_;  // of refreshSoon(); null: nobody has asked, or it is done
};

class Segment::Asking {
 public:
  explicit Asking(uint64_t generation) : generation_(generation) {}
  bool isDone() const { return isDone_.load(std::memory_order_acquire); }
  const Status& answer() const { return answer_; }  // once it is done

 private:
  friend class Segment;
  const uint64_t generation_;  // of what had been known
  Status answer_;              // written before isDone_
  std::atomic<bool> isDone_{false};
  std::vector<Doorbell*> bells_;  // guarded by the segment
};

}  // namespace mooncake::transfer
