#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <torch/version.h>

#include "devices.h"

namespace fake_device {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
using AllocatorBase = c10::Allocator;
#else
using AllocatorBase = c10::DeviceAllocator;
#endif

// Device memory for torch, in the order of streams, as CUDA's caching allocator. The stream that
// memory was allocated on may use it again as soon as it is freed. Other streams that use it must
// be recorded; then it is used again when they have passed their work so far. New memory is
// overwritten on its stream, and so is freed memory when its stream allocates again, whatever the
// size: a stream that reads it too late reads garbage. Not as soon as it is freed: a program may
// free memory that another stream still reads if the memory's stream waits for that one before it
// allocates, as torch's FSDP2 does. Thread-safe.
class Allocator final : public AllocatorBase {
 public:
  // Allocates for the current stream. Raises OutOfMemoryError if the device has no memory left.
  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  void recordUse(const c10::DataPtr& memory, const c10::Stream& stream);

  // Between these two calls the stream's work is recorded into a graph. Memory that the stream
  // allocates meanwhile stays the graph's own, since each replay uses it again.
  void beginGraph(const c10::Stream& stream);
  void endGraph(const c10::Stream& stream);

  // These lack `override`, because torch 2.8 does not declare them.
  bool initialized() { return true; }
  void emptyCache(std::pair<unsigned long long, unsigned long long> pool = {0, 0});
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) { recordUse(memory, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device);
  void resetAccumulatedStats(c10::DeviceIndex device);
  void resetPeakStats(c10::DeviceIndex device);

 private:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  struct Block {
    std::span<std::byte> memory;
    c10::Stream stream;             // the order in which the memory is used again
    uint64_t graph;                 // the graph that owns the memory; 0: none
    size_t requested;               // bytes
    bool isOverwritten;             // since it was freed
    std::vector<c10::Stream> uses;  // other streams that were recorded
  };
  struct Awaited {
    Block* block;
    std::vector<std::unique_ptr<mooncake::DeviceEvent>> uses;
  };
  using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
  using CacheKey = std::tuple<StreamKey, uint64_t, size_t>;

  static StreamKey keyOf(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static void release(void* block);  // deleter of a DataPtr
  static void overwrite(Block& block);

  // The functions below are called with the lock held.
  uint64_t graphOf(const c10::Stream& stream) const;
  void overwriteCached(const c10::Stream& stream);
  Block* takeCached(const c10::Stream& stream, size_t bytes);
  Block* make(const c10::Stream& stream, size_t bytes);
  void free(Block* block);
  void retire(Block* block);  // caches it at once, or when the recorded streams have passed
  void cache(Block* block);
  void cachePassed();
  void giveBack(c10::DeviceIndex device);

  std::mutex mutex_;
  std::multimap<CacheKey, Block*> cached_;
  std::vector<Awaited> awaited_;     // freed, but streams may still use them
  std::vector<Block*> afterGraphs_;  // freed while a graph was recorded, after use on other streams
  std::map<StreamKey, uint64_t> graphs_;  // those being recorded
  uint64_t lastGraph_ = 0;
  std::array<Stats, kDevices> stats_;
};

Allocator& allocator();

}  // namespace fake_device
