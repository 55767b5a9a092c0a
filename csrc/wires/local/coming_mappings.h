#pragma once

#include <functional>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <tuple>

#include "base/event_loop.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/memory_owner.h"

namespace mooncake {

struct Completion;

// Names memory of a peer as one device maps it: handle, allocation, device.
using MappingKey = std::tuple<std::string, uint64_t, Accelerator*, int>;

// Gets of memory that a peer offers (DescriptorOffers), until it is mapped here: the peer's process
// must hand it over for that. Thread-safe.
class ComingMappings : public std::enable_shared_from_this<ComingMappings> {
 public:
  explicit ComingMappings(EventLoop& loop) : loop_(loop) {}

  struct Wanted {
    ExportedMemory memory;
    MemoryOwner owner;

    MappingKey key() const {
      return {memory.handle, memory.allocation, owner.accelerator, owner.device};
    }
  };
  // Maps the memory. On the loop's thread.
  using Map = std::function<void(const Wanted& wanted, const Fd& descriptor)>;
  // `how`: ok once map() was called; kUnsupported if the peer does not hand the memory over;
  // kAborted from await() and close().
  using Then = std::function<void(const Status& how)>;
  // Calls `then` once: on the loop's thread, or on one that awaits or closes. Without a lock.
  void add(Wanted wanted, const Completion* completion, Map map, Then then);

  // Ends the mappings of the completion. None is left when this returns.
  void await(const Completion* completion);
  // Ends all mappings, also later ones.
  void close();

 private:
  struct Waiting {
    MappingKey key;
    const Completion* completion;
    Then then;
    bool isEnding = false;
  };
  using Which = std::function<bool(const Waiting&)>;

  void request(const Wanted& wanted, const Map& map);
  void end(const Which& which, const Status& how) EXCLUDES(mutex_);

  EventLoop& loop_;
  Mutex mutex_;
  Condition ended_;
  std::list<Waiting> waiting_ GUARDED_BY(mutex_);
  std::set<MappingKey> requested_ GUARDED_BY(mutex_);
  bool isClosed_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
