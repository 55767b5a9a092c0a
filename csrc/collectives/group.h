#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/wait.h"
#include "collectives/slot.h"
#include "engine/engine.h"
#include "engine/rendezvous/store.h"
#include "engine/window.h"

namespace mooncake {

struct GroupOptions {
  std::string name;  // for messages
  int rank = 0;
  int size = 1;
  std::vector<int> globalRanks;  // of the members, in rank order; empty: ranks are global ranks
};

// The ranks that call operations together, and what they share for it: a window and a count of
// operations. Operations of one group run one after the other (the caller sees to that),
// point-to-point beside them.
class Group {
 public:
  // Collective over the group: every member calls it. The store may be gone afterwards.
  static Result<std::unique_ptr<Group>> create(std::shared_ptr<Engine> engine, Store& store,
                                               GroupOptions options, Deadline deadline);
  ~Group();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  Engine& engine() const { return window_->engine(); }
  const Window& window() const { return *window_; }
  const PartLayout& layout() const { return layout_; }
  // All ranks are mapped here and are more than the cores: whoever waits gives its core away.
  bool isCrowded() const { return isCrowded_; }
  size_t slotBytes() const { return slotBytes_; }    // what a slot's payload holds
  size_t eagerBytes() const { return eagerBytes_; }  // what all ranks exchange in slots at most
  // "rank 3", and "rank 3 (global rank 7)" where they differ.
  std::string nameRank(int rank) const;

  Waiter waiter(Deadline deadline) const;
  // Any thread: every wait of this group ends and every later operation is refused with this error.
  // The first call wins.
  void fail(Error why);
  // Waits until every rank that reads our memory for the last operation has ended it, or is gone,
  // so that its engine may go, too. The group is not used afterwards.
  void leave(Deadline deadline);
  // What fail() said.
  Status usable() const;

  // Memory that lasts from one operation to the next; contents are not kept. The shared block's
  // results are read by peers until they have begun the next operation, so it is taken after
  // awaitAllBegun() of a later one.
  struct Shared {
    std::byte* data = nullptr;
    RemoteRegion region;
  };
  Result<Shared> shared(size_t bytes);       // peers can fetch from it
  Result<std::byte*> undo(size_t bytes);     // where an operation keeps data as it was
  Result<std::byte*> scratch(size_t bytes);  // small, stays in the cache

  std::span<const std::byte*> sources();  // one pointer per rank

  uint64_t lastNumber = 0;  // of the operations of this group
  bool everybodyBegan =
      true;  // the last operation saw everybody's slot, so its slot may be reused in two

 private:
  Group(GroupOptions options, PartLayout layout, size_t slotBytes, size_t eagerBytes)
      : options_(std::move(options)),
        layout_(layout),
        slotBytes_(slotBytes),
        eagerBytes_(eagerBytes) {}

  // Grows by need, in powers of two.
  struct PrivateBlock {
    std::unique_ptr<std::byte, void (*)(void*)> data{nullptr, nullptr};
    size_t bytes = 0;
    Result<std::byte*> atLeast(size_t wanted);
  };

  GroupOptions options_;
  PartLayout layout_;
  size_t slotBytes_;
  size_t eagerBytes_;
  std::unique_ptr<Window> window_;
  SpinPolicy spin_;
  bool isCrowded_ = false;
  Interrupt interrupt_;
  mutable std::mutex failureMutex_;
  Status failure_;
  ArenaBlock sharedBlock_;
  MemoryRegion sharedRegion_;
  PrivateBlock undo_;
  PrivateBlock scratch_;
  std::vector<const std::byte*> sources_;
};

}  // namespace mooncake
