#include "device/cuda/cuda_pinned_pool.h"

#include <algorithm>

#include "base/log.h"
#include "device/cuda/cuda_scope.h"

namespace mooncake {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMostWaste = 8;  // a block serves a request that is an eighth smaller at most

bool areSame(DeviceStream a, DeviceStream b) {
  return a.device == b.device && a.handle == b.handle;
}

CUstream handleOf(DeviceStream stream) { return static_cast<CUstream>(stream.handle); }

}  // namespace

Result<std::span<std::byte>> CudaPinnedPool::allocate(size_t bytes) {
  if (bytes == 0)
    return Error{ErrorCode::kInvalidArgument, "cuda: an allocation of 0 bytes of pinned memory"};
  const auto device = contexts_.anyInUse();
  if (!device.ok()) return device.error();
  const auto context = contexts_.inUse(*device);
  if (!context.ok()) return context.error();
  const size_t capacity = (bytes + kPage - 1) / kPage * kPage;
  {
    Lock lock(mutex_);
    reclaim();
    // Callers with many sizes round up (PinnedPool), so no size is rounded here.
    const auto found = available_.lower_bound(capacity);
    if (found != available_.end() && found->first - capacity <= capacity / kMostWaste) {
      std::byte* const start = found->second;
      available_.erase(found);
      blocks_[start].isFreed = false;
      return std::span(start, bytes);
    }
  }
  // Without the lock: the driver takes its time.
  const CudaScope scope(contexts_, *device, *context);
  MOONCAKE_TRY(scope.status());
  void* start = nullptr;
  MOONCAKE_TRY(
      contexts_.check("cuMemHostAlloc", *device,
                      contexts_.driver().cuMemHostAlloc(
                          &start, capacity, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)));
  Lock lock(mutex_);
  blocks_[static_cast<std::byte*>(start)] = {.capacity = capacity};
  return std::span(static_cast<std::byte*>(start), bytes);
}

void CudaPinnedPool::free(std::span<std::byte> memory) {
  if (contexts_.isForked()) return;
  Lock lock(mutex_);
  const auto found = blocks_.find(memory.data());
  if (found == blocks_.end() || found->second.isFreed) {
    log(LogLevel::kError, "device", "cuda freePinned: there is no such allocation at ",
        memory.data());
    return;
  }
  found->second.isFreed = true;
  freed_.push_back(found->first);
  reclaim();  // records the events now, so that later work is not waited for
}

void CudaPinnedPool::use(const void* address, DeviceStream stream) {
  Lock lock(mutex_);
  auto* const at = static_cast<std::byte*>(const_cast<void*>(address));
  auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) return;
  auto& [start, block] = *--after;
  if (static_cast<size_t>(at - start) >= block.capacity) return;
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  if (contexts_.driver().cuStreamIsCapturing(handleOf(stream), &capture) == CUDA_SUCCESS &&
      capture != CU_STREAM_CAPTURE_STATUS_NONE) {
    block.isRetired = true;
    return;
  }
  const auto isUser = [&](DeviceStream user) { return areSame(user, stream); };
  if (std::ranges::none_of(block.users, isUser)) block.users.push_back(stream);
}

void CudaPinnedPool::leave(DeviceStream stream) {
  Lock lock(mutex_);
  for (auto& [start, block] : blocks_) {
    const auto isUser = [&](DeviceStream user) { return areSame(user, stream); };
    const auto found = std::ranges::find_if(block.users, isUser);
    if (found == block.users.end()) continue;
    block.users.erase(found);
    const auto recorded = record(block, stream);
    if (!recorded.ok() || !*recorded) block.isRetired = true;
  }
}

void CudaPinnedPool::reclaim() {
  std::erase_if(freed_, [this](std::byte* start) REQUIRES(mutex_) {
    Block& block = blocks_[start];
    const auto settled = settle(block);
    if (!settled.ok()) {
      log(LogLevel::kWarning, "device", block.capacity,
          " bytes of pinned memory are not used again: ", settled.error().message);
      block.isRetired = true;
    }
    if (block.isRetired) return true;
    if (!*settled) return false;
    available_.emplace(block.capacity, start);
    return true;
  });
}

Result<bool> CudaPinnedPool::settle(Block& block) {
  while (!block.users.empty()) {
    const DeviceStream stream = block.users.back();
    const auto context = contexts_.chosen(stream.device);
    if (!context.ok()) return context.error();
    const CudaScope scope(contexts_, stream.device, *context);
    MOONCAKE_TRY(scope.status());
    const auto recorded = record(block, stream);
    if (!recorded.ok() || !*recorded) return recorded;
    block.users.pop_back();
  }
  while (!block.events.empty()) {
    const auto passed = hasPassed(block.events.back());
    if (!passed.ok() || !*passed) return passed;
    block.events.pop_back();
  }
  return true;
}

Result<bool> CudaPinnedPool::record(Block& block, DeviceStream stream) {
  const CudaDriver& driver = contexts_.driver();
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  MOONCAKE_TRY(contexts_.check("cuStreamIsCapturing", stream.device,
                               driver.cuStreamIsCapturing(handleOf(stream), &capture)));
  if (capture != CU_STREAM_CAPTURE_STATUS_NONE) return false;
  CUevent event = nullptr;
  MOONCAKE_TRY(contexts_.check("cuEventCreate", stream.device,
                               driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)));
  const Status recorded = contexts_.check("cuEventRecord", stream.device,
                                          driver.cuEventRecord(event, handleOf(stream)));
  if (!recorded.ok()) {
    driver.cuEventDestroy(event);
    return recorded;
  }
  block.events.push_back({.device = stream.device, .event = event});
  return true;
}

Result<bool> CudaPinnedPool::hasPassed(const Recorded& recorded) {
  const auto context = contexts_.chosen(recorded.device);
  if (!context.ok()) return context.error();
  const CudaScope scope(contexts_, recorded.device, *context);
  MOONCAKE_TRY(scope.status());
  const CUresult result = contexts_.driver().cuEventQuery(recorded.event);
  if (result == CUDA_ERROR_NOT_READY) return false;
  MOONCAKE_TRY(contexts_.check("cuEventQuery", recorded.device, result));
  contexts_.driver().cuEventDestroy(recorded.event);
  return true;
}

}  // namespace mooncake
