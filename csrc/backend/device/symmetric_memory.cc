#include "backend/device/symmetric_memory.h"

#ifdef MOONCAKE_HAS_SYMMETRIC_MEMORY

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/errors.h"
#include "base/log.h"

namespace mooncake {

void SymmetricAllocation::use(DeviceStream stream) const {
  const auto isSame = [&](DeviceStream known) { return known.handle == stream.handle; };
  Lock lock(mutex_);
  if (std::ranges::none_of(streams_, isSame)) streams_.push_back(stream);
}

void SymmetricAllocation::useCurrentStream() const {
  use(orThrow(nativeStream(c10::impl::VirtualGuardImpl(device.type()).getStream(device))));
}

void SymmetricAllocation::defer(std::function<void()> end) const noexcept {
  if (c10d::symmetric_memory::is_finalizing() || generation != forkGeneration()) return;
  try {
    useCurrentStream();
    Lock lock(mutex_);
    auto streams = streams_;
    lock.unlock();
    ends->add(accelerator, std::move(streams), std::move(end));
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, accelerator.name(), "symmetric memory stays mapped: ", error.what());
  }
}

SymmetricAllocation::~SymmetricAllocation() {
  if (memory.empty()) return;
  defer([&accelerator = accelerator, memory = memory, total = total] {
    const Status unmapped = accelerator.peerMemory()->unmapShared(memory);
    if (unmapped.ok()) {
      *total -= memory.size();
    } else {
      log(LogLevel::kWarning, accelerator.name(), unmapped.error().message);
    }
  });
}

MappedSymmetricMemory::MappedSymmetricMemory(std::shared_ptr<PeerSharing> group,
                                             std::shared_ptr<const SymmetricAllocation> own,
                                             std::vector<std::span<std::byte>> mapped,
                                             std::vector<int> globalRanks)
    : group_(std::move(group)),
      own_(std::move(own)),
      mapped_(std::move(mapped)),
      globalRanks_(std::move(globalRanks)) {
  for (void* const pad : get_signal_pad_ptrs()) pads_.push_back(static_cast<uint32_t*>(pad));
  std::vector<int64_t> addresses;
  for (void* const data : get_buffer_ptrs()) addresses.push_back(reinterpret_cast<int64_t>(data));
  for (void* const pad : pads_) addresses.push_back(reinterpret_cast<int64_t>(pad));
  addresses_ = at::tensor(addresses, at::kLong).to(own_->device);
  globalRanksOnDevice_ = at::tensor(globalRanks_, at::kInt).to(own_->device);
  own_->useCurrentStream();
}

// Kernels of signals that still run have words of the group, which end after them.
MappedSymmetricMemory::~MappedSymmetricMemory() {
  auto theirs = mapped_;
  theirs.erase(theirs.begin() + group_->rank());
  own_->defer(
      [&accelerator = own_->accelerator, theirs = std::move(theirs), words = group_->words()] {
        for (const auto memory : theirs) {
          const Status unmapped = accelerator.peerMemory()->unmapShared(memory);
          if (!unmapped.ok()) log(LogLevel::kWarning, accelerator.name(), unmapped.error().message);
        }
      });
}

std::vector<void*> MappedSymmetricMemory::get_buffer_ptrs() {
  std::vector<void*> all;
  for (const auto& memory : mapped_) all.push_back(memory.data());
  return all;
}

std::vector<void*> MappedSymmetricMemory::get_signal_pad_ptrs() {
  std::vector<void*> all;
  for (const auto& memory : mapped_) all.push_back(memory.data() + own_->padOffset);
  return all;
}

void** MappedSymmetricMemory::get_buffer_ptrs_dev() {
  return static_cast<void**>(addresses_.data_ptr());
}

void** MappedSymmetricMemory::get_signal_pad_ptrs_dev() {
  return get_buffer_ptrs_dev() + mapped_.size();
}

int* MappedSymmetricMemory::get_rank_to_global_rank_dev() {
  return static_cast<int*>(globalRanksOnDevice_.data_ptr());
}

void MappedSymmetricMemory::barrier(int channel, size_t timeout_ms) {
  const uint64_t others =
      (~uint64_t(0) >> (64 - group_->size())) & ~(uint64_t(1) << group_->rank());
  signal("barrier", channel, others, others, timeout_ms);
}

void MappedSymmetricMemory::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  signal("put_signal", channel, bitOf("put_signal", dst_rank), 0, timeout_ms);
}

void MappedSymmetricMemory::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  signal("wait_signal", channel, 0, bitOf("wait_signal", src_rank), timeout_ms);
}

uint64_t MappedSymmetricMemory::bitOf(const char* name, int rank) const {
  if (rank < 0 || rank >= group_->size()) {
    refuse(std::string(name) + ": rank " + std::to_string(rank) + " is not in a group of " +
           std::to_string(group_->size()));
  }
  return uint64_t(1) << rank;
}

void MappedSymmetricMemory::signal(const char* name, int channel, uint64_t puts, uint64_t waits,
                                   size_t timeoutMs) {
  const auto channels = int64_t(own_->padBytes / sizeof(uint32_t) / size_t(group_->size()));
  if (channel < 0 || channel >= channels) {
    refuse(std::string(name) + ": channel " + std::to_string(channel) + " of " +
           std::to_string(channels) + "; a larger signal pad has more");
  }
  const DeviceStream stream = orThrow(
      nativeStream(c10::impl::VirtualGuardImpl(own_->device.type()).getStream(own_->device)));
  own_->use(stream);
  throwIfError(group_->signal(stream, pads_,
                              {.name = name,
                               .channel = uint32_t(channel),
                               .puts = puts,
                               .waits = waits,
                               .timeout = std::chrono::milliseconds(timeoutMs)}));
}

}  // namespace mooncake

#endif
