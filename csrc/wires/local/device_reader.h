#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "device/memory_owner.h"
#include "engine/contract/transfer.h"
#include "engine/memory/arena.h"
#include "engine/memory/device_exports.h"
#include "engine/memory/region_table.h"
#include "wires/local/coming_mappings.h"
#include "wires/stream/copy_watch.h"

namespace mooncake {

class StreamQueues;

// Reads memory of devices that one peer of the host has registered: maps it, and has a device of this
// process copy. A mapping goes with the first new one after the peer has unregistered all that it was
// made for, or at close(). Thread-safe.
class DeviceReader : public std::enable_shared_from_this<DeviceReader> {
 public:
  struct Peer {
    std::shared_ptr<ArenaMapping> arena;
    uint64_t mirror = 0;      // offset of its RegionMirror
    uint64_t exports = 0;     // of its DeviceExports
    bool mapsHandles = true;  // the accelerator's own, besides offered memory
  };
  // `loop` looks for the ends of copies.
  DeviceReader(Peer peer, EventLoop& loop);
  ~DeviceReader();  // after close()
  DeviceReader(const DeviceReader&) = delete;
  DeviceReader& operator=(const DeviceReader&) = delete;

  class Mapping;
  // The start of a region as a device sees it.
  struct Place {
    std::shared_ptr<const Mapping> mapping;
    const std::byte* start = nullptr;
  };
  // Maps the region for a device, if that was not done before: this may take the driver milliseconds.
  // kUnsupported: it cannot be mapped, or not for this device. kRefused: the peer has no such region.
  // kInterrupted: the peer has to hand the memory over first, see whenMapped().
  Result<Place> find(const RemoteRegion& region, const MemoryOwner& owner);
  // Calls `then` once, without a lock, on the loop's thread or one that waits here. Ok: find() has
  // another answer now. kUnsupported: the memory does not come. kAborted: from await() or close().
  using Then = ComingMappings::Then;
  void whenMapped(const RemoteRegion& region, const MemoryOwner& owner,
                  const Completion* completion, Then then);

  struct Copy {
    Place from;
    uint64_t offset = 0;  // in the region
    std::span<std::byte> target;
    MemoryOwner owner;                       // the device of the target
    const Completion* completion = nullptr;  // null: the peer's write
    RegionTable::Use use;                    // held until the copy has ended
    std::function<void(const Status&)> onEnd;
  };
  // Begins a copy. onEnd() is called once, on the loop's thread or any that waits here, without a
  // lock. If the copy cannot begin, it is called at once.
  void begin(Copy copy);

  // Returns when no copy that counts at the completion is under way. Ends copies that wait for
  // their memory.
  void await(const Completion* completion);
  // Waits for all copies, and unmaps. No copy begins afterwards.
  void close();

 private:
  struct Known {
    std::shared_ptr<const Mapping> mapping;  // null: it cannot be mapped
    std::set<uint64_t> regions;              // keys
  };
  struct Device {
    StreamQueues* queues;
    DeviceStream stream;  // of all copies under way
    size_t underWay = 0;
    std::vector<std::unique_ptr<DeviceEvent>> free;
  };
  struct UnderWay {
    Copy copy;
    std::unique_ptr<DeviceEvent> event;
    bool isEnding = false;
  };

  const RegionMirror& mirror() const;
  const DeviceExports& exports() const;
  Result<ExportedMemory> exportOf(const RemoteRegion& region) const;
  void mapOffered(const ComingMappings::Wanted& wanted, const Fd& descriptor) EXCLUDES(mapMutex_);
  void keep(const MappingKey& key, Result<std::shared_ptr<const Mapping>> mapping)
      REQUIRES(mapMutex_);
  void forgetRevoked() REQUIRES(mapMutex_);
  Status enqueue(UnderWay& copy) REQUIRES(mutex_);
  uint64_t look() EXCLUDES(mutex_);

  const Peer peer_;
  CopyWatch watch_;
  const std::shared_ptr<ComingMappings> coming_;
  Mutex mapMutex_;  // held while the driver maps
  std::map<MappingKey, Known> known_ GUARDED_BY(mapMutex_);
  Mutex mutex_;
  std::map<std::pair<Accelerator*, int>, Device> devices_ GUARDED_BY(mutex_);
  std::list<UnderWay> underWay_ GUARDED_BY(mutex_);
  bool isClosed_ GUARDED_BY(mutex_) = false;
  uint64_t ended_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake
