#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "device/memory_owner.h"
#include "engine/contract/transfer.h"
#include "engine/memory/arena.h"
#include "engine/memory/device_exports.h"
#include "engine/memory/region_table.h"
#include "engine/stream/copy_watch.h"

namespace mooncake {

// Reads memory of devices that one peer of the host has registered: maps it, and has a device of this
// process copy. A mapping goes with the first new one after the peer has unregistered all that it was
// made for, or at close(). Thread-safe.
class DeviceReader : public std::enable_shared_from_this<DeviceReader> {
 public:
  struct Peer {
    std::shared_ptr<ArenaMapping> arena;
    uint64_t mirror = 0;   // offset of its RegionMirror
    uint64_t exports = 0;  // of its DeviceExports
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
  Result<Place> find(const RemoteRegion& region, const MemoryOwner& owner);

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

  // Returns when no copy that counts at the completion is under way.
  void await(const Completion* completion);
  // Waits for all copies, and unmaps. No copy begins afterwards.
  void close();

 private:
  using Key = std::tuple<std::string, uint64_t, Accelerator*, int>;  // handle, allocation, device
  struct Known {
    std::shared_ptr<const Mapping> mapping;  // null: it cannot be mapped
    std::set<uint64_t> regions;              // keys
  };
  struct Device {
    DeviceStream stream;
    std::vector<std::unique_ptr<DeviceEvent>> free;
  };
  struct UnderWay {
    Copy copy;
    DeviceStream stream;
    std::unique_ptr<DeviceEvent> event;
    bool isEnding = false;
  };

  const RegionMirror& mirror() const;
  const DeviceExports& exports() const;
  Result<std::shared_ptr<const Mapping>> map(const ExportedMemory& memory,
                                             const MemoryOwner& owner) const;
  void forgetRevoked();
  Status enqueue(UnderWay& copy);
  uint64_t look();

  const Peer peer_;
  CopyWatch watch_;
  std::mutex mapMutex_;  // guards known_. Held while the driver maps
  std::map<Key, Known> known_;
  std::mutex mutex_;  // guards the fields below
  std::map<std::pair<Accelerator*, int>, Device> devices_;
  std::list<UnderWay> underWay_;
  bool isClosed_ = false;
  uint64_t ended_ = 0;
};

}  // namespace mooncake
