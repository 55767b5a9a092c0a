#pragma once

#include "backend/device/has_symmetric_memory.h"

#ifdef MOONCAKE_HAS_SYMMETRIC_MEMORY

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "base/fork.h"
#include "base/mutex.h"
#include "device/deferred_ends.h"
#include "peers/peer_sharing.h"

namespace mooncake {

// Memory of a device that other processes may map, with a pad for signals behind the data. It stays
// mapped after its end, until the work of its streams is over (DeferredEnds).
struct SymmetricAllocation {
  SymmetricAllocation(Accelerator& accelerator, const c10::Device& device)
      : accelerator(accelerator), device(device) {}
  ~SymmetricAllocation();
  SymmetricAllocation(const SymmetricAllocation&) = delete;
  SymmetricAllocation& operator=(const SymmetricAllocation&) = delete;

  Accelerator& accelerator;
  const c10::Device device;
  SharedAllocation shared;
  std::span<std::byte> memory;
  size_t bytes = 0;      // of the data
  size_t padOffset = 0;  // of the pad
  size_t padBytes = 0;
  std::shared_ptr<std::atomic<size_t>> total;  // bytes of all allocations
  std::shared_ptr<DeferredEnds> ends;          // of all allocations
  const uint32_t generation = forkGeneration();

  // Work of this stream uses the memory. A stream of the program outlives the memory.
  void use(DeviceStream stream) const;
  // The same for the thread's current stream of the device. Throws.
  void useCurrentStream() const;
  // `end` runs in a later call, once the work of all streams of use() and of the current one is over.
  // It never runs in a process that ends, in a forked child of the owner, or without the context.
  void defer(std::function<void()> end) const noexcept;

 private:
  mutable Mutex mutex_;
  mutable std::vector<DeviceStream> streams_ GUARDED_BY(mutex_);
};

// Allocations of all ranks of a process group, as torch hands them out. Keeps this rank's allocation
// and other ranks' mapped, also if their processes end. Signals between ranks wait at most for the
// timeout; a later call raises an error that names the rank.
class MappedSymmetricMemory final : public c10d::symmetric_memory::SymmetricMemory {
 public:
  // `mapped`: the memory of each rank, see PeerSharing. Throws.
  MappedSymmetricMemory(std::shared_ptr<PeerSharing> group,
                        std::shared_ptr<const SymmetricAllocation> own,
                        std::vector<std::span<std::byte>> mapped, std::vector<int> globalRanks);
  ~MappedSymmetricMemory() override;

  std::vector<void*> get_buffer_ptrs() override;
  std::vector<void*> get_signal_pad_ptrs() override;
  void** get_buffer_ptrs_dev() override;
  void** get_signal_pad_ptrs_dev() override;
  size_t get_buffer_size() override { return own_->bytes; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;
  int get_rank() override { return group_->rank(); }
  int get_world_size() override { return group_->size(); }
  c10::Device get_device() override { return own_->device; }
  const std::vector<int>& get_rank_to_global_rank() override { return globalRanks_; }
  int* get_rank_to_global_rank_dev() override;
  bool world_within_direct_access() override { return true; }

 private:
  void signal(const char* name, int channel, uint64_t puts, uint64_t waits, size_t timeoutMs);
  uint64_t bitOf(const char* name, int rank) const;

  const std::shared_ptr<PeerSharing> group_;
  const std::shared_ptr<const SymmetricAllocation> own_;
  const std::vector<std::span<std::byte>> mapped_;  // by rank
  const std::vector<int> globalRanks_;
  std::vector<uint32_t*> pads_;
  at::Tensor addresses_;  // on the device: of the data by rank, then of the pads
  at::Tensor globalRanksOnDevice_;
};

}  // namespace mooncake

#endif
