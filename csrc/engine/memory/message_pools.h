#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "base/event_loop.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/memory_owner.h"
#include "device/shared_pool.h"
#include "engine/memory/descriptor_offers.h"

namespace mooncake {

// Memory of devices for messages between processes of one host, of one engine. Ends when the engine's
// loop has stopped. Thread-safe.
class MessagePools {
 public:
  // `bytes`: of each pool. 0: there are none.
  MessagePools(EventLoop& loop, size_t bytes) : loop_(loop), bytes_(bytes) {}

  bool isOn() const { return bytes_ != 0; }

  // The pools of one device. A piece of them may outlive the engine.
  struct Device {
    // The users are peers.
    std::shared_ptr<SharedPool> sends;     // peers map it
    std::shared_ptr<SharedPool> receives;  // of this process alone
    ExportedMemory offer;                  // of all memory of `sends`
  };
  // Makes them if they are not there. Fails alike for ever: kUnsupported if other processes cannot map
  // the device's memory, kExhausted if it has too little.
  Result<Device> of(const MemoryOwner& device);

  // Returns the offer for a part of the memory of `sends`.
  static ExportedMemory offerOf(const Device& device, std::span<const std::byte> part);

 private:
  Result<Device> make(const MemoryOwner& device) REQUIRES(mutex_);

  EventLoop& loop_;
  const size_t bytes_;
  Mutex mutex_;
  std::unique_ptr<DescriptorOffers> offers_ GUARDED_BY(mutex_);
  std::map<std::pair<Accelerator*, int>, Result<Device>> devices_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
