#pragma once

#include "backend/device/has_symmetric_memory.h"

#ifdef MOONCAKE_HAS_SYMMETRIC_MEMORY

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "backend/device/symmetric_memory.h"
#include "base/mutex.h"

namespace mooncake {

// Makes "MOONCAKE" a backend of torch.distributed._symmetric_memory, for devices that share memory
// with other processes. Thread-safe; throws.
class SymmetricAllocator final : public c10d::symmetric_memory::SymmetricMemoryAllocator {
 public:
  explicit SymmetricAllocator(std::function<void(const std::function<void()>&)> unlocked)
      : unlocked_(std::move(unlocked)) {}

  void* alloc(size_t size, int device_idx, const std::optional<std::string>& group_name) override;
  // Waits for no device, so it may come in a capture. The memory is unmapped by a later alloc() or
  // rendezvous(), once the work of its streams is over: those that were current when it was allocated,
  // exchanged and freed, and those of signals. Rendezvoused memory stays until its handles are gone,
  // too.
  void free(void* ptr) override;
  size_t get_alloc_size(void* ptr) override;
  // Collective over the process group, which has our backend for the device. A later call returns
  // the same handle, if it does on all ranks.
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> rendezvous(
      void* ptr, const std::optional<std::string>& group_name) override;
  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override;
  std::string name() override { return "MOONCAKE"; }
  // Without `override`: torch has this since 2.15 or somewhat before.
  bool has_allocation(void* ptr);

 private:
  using Handle = c10::intrusive_ptr<MappedSymmetricMemory>;
  struct Entry {
    std::shared_ptr<const SymmetricAllocation> allocation;
    std::map<std::shared_ptr<PeerSharing>, Handle> handles;
  };
  // Stays when the process ends: the accelerators may be gone by then.
  struct State {
    const uint32_t generation = forkGeneration();
    Mutex mutex;
    std::map<void*, Entry> entries GUARDED_BY(mutex);
    uint64_t lastNumber GUARDED_BY(mutex) = 0;
    const std::shared_ptr<std::atomic<size_t>> bytes = std::make_shared<std::atomic<size_t>>(0);
    const std::shared_ptr<DeferredEnds> ends = std::make_shared<DeferredEnds>();
  };

  void* allocate(size_t size, c10::Device device);
  PeerMemory::Allocation share(PeerMemory& memory, int device, size_t bytes);
  Handle meet(void* ptr, const std::string& groupName);
  Entry find(void* ptr);

  const std::function<void(const std::function<void()>&)> unlocked_;
  State& state_ = *new State;
};

// Makes the backend known to torch. `unlocked` calls a function without Python's lock: torch's own
// calls come with it, and ours wait for other ranks and for devices.
void registerSymmetricMemory(std::function<void(const std::function<void()>& call)> unlocked);

}  // namespace mooncake

#endif
