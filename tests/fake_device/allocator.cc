#include "allocator.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <c10/util/Exception.h>

#include "streams.h"

namespace fake_device {

namespace {
constexpr size_t kGranule = 512;  // bytes: sizes are rounded up, so memory fits more often
constexpr int kGarbage = 0xdb;

// The statistics that this allocator keeps; the others stay 0.
auto inUse(c10::CachingDeviceAllocator::DeviceStats& stats) {
  return std::array{&stats.allocation,     &stats.allocated_bytes, &stats.active,
                    &stats.active_bytes,   &stats.segment,         &stats.reserved_bytes,
                    &stats.requested_bytes};
}
}  // namespace

c10::DataPtr Allocator::allocate(size_t bytes) {
  const c10::Stream stream = currentStream(currentDevice());
  if (bytes == 0) return {nullptr, stream.device()};
  const std::lock_guard lock(mutex_);
  cachePassed();
  overwriteCached(stream);
  const size_t rounded = (bytes + kGranule - 1) / kGranule * kGranule;
  Block* block = takeCached(stream, rounded);
  if (block == nullptr) block = make(stream, rounded);
  block->requested = bytes;
  Stats& stats = stats_[stream.device_index()];
  stats.allocation[0].increase(1);
  stats.active[0].increase(1);
  stats.allocated_bytes[0].increase(rounded);
  stats.active_bytes[0].increase(rounded);
  stats.requested_bytes[0].increase(bytes);
  return {block->memory.data(), block, &release, stream.device()};
}

void Allocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  check(devices().copy(nativeStream(currentStream(currentDevice())), to, from, bytes));
}

void Allocator::recordUse(const c10::DataPtr& memory, const c10::Stream& stream) {
  auto* const block = memory.cast_context<Block>(&release);
  if (block == nullptr) return;  // not from here
  const std::lock_guard lock(mutex_);
  auto& uses = block->uses;
  if (stream != block->stream && std::find(uses.begin(), uses.end(), stream) == uses.end())
    uses.push_back(stream);
}

void Allocator::release(void* block) {
  Allocator& all = allocator();
  const std::lock_guard lock(all.mutex_);
  all.free(static_cast<Block*>(block));
}

void Allocator::overwrite(Block& block) {
  block.isOverwritten = true;
  // Fails once the context is lost. Then no stream uses the memory any more.
  (void)devices().enqueue(nativeStream(block.stream), [memory = block.memory] {
    std::memset(memory.data(), kGarbage, memory.size());
  });
}

uint64_t Allocator::graphOf(const c10::Stream& stream) const {
  if (graphs_.empty()) return 0;
  const auto found = graphs_.find(keyOf(stream));
  if (found != graphs_.end()) return found->second;
  const auto joined = devices().isCapturing(nativeStream(stream));  // by an event of a graph's
  return joined.ok() && *joined ? lastGraph_ : 0;
}

// If the stream is recorded, the task that overwrites is part of the graph, and each replay runs it
// again: right for the graph's own memory, and wrong for memory that others may have by then.
void Allocator::overwriteCached(const c10::Stream& stream) {
  const StreamKey key = keyOf(stream);
  const uint64_t graph = graphOf(stream);
  const auto end = cached_.upper_bound({key, graph, std::numeric_limits<size_t>::max()});
  for (auto next = cached_.lower_bound({key, graph, 0}); next != end; ++next) {
    if (!next->second->isOverwritten) overwrite(*next->second);
  }
}

Allocator::Block* Allocator::takeCached(const c10::Stream& stream, size_t bytes) {
  const auto found = cached_.find({keyOf(stream), graphOf(stream), bytes});
  if (found == cached_.end()) return nullptr;
  Block* const block = found->second;
  cached_.erase(found);
  return block;
}

Allocator::Block* Allocator::make(const c10::Stream& stream, size_t bytes) {
  const c10::DeviceIndex device = stream.device_index();
  Stats& stats = stats_[device];
  auto memory = devices().allocate(device, bytes);
  if (!memory.ok() && memory.error().code == mooncake::ErrorCode::kExhausted) {
    ++stats.num_alloc_retries;
    giveBack(device);
    memory = devices().allocate(device, bytes);
    if (!memory.ok()) ++stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, memory.ok(), "fake device: out of memory on device ",
                     int(device), ": ", memory.error().message);
  }
  auto* const block = new Block{valueOf(std::move(memory)), stream, graphOf(stream), 0, false, {}};
  overwrite(*block);
  ++stats.num_device_alloc;
  stats.segment[0].increase(1);
  stats.reserved_bytes[0].increase(bytes);
  return block;
}

void Allocator::free(Block* block) {
  Stats& stats = stats_[block->stream.device_index()];
  stats.allocation[0].decrease(1);
  stats.allocated_bytes[0].decrease(block->memory.size());
  stats.requested_bytes[0].decrease(block->requested);
  retire(block);
}

void Allocator::retire(Block* block) {
  if (block->uses.empty()) return cache(block);
  if (!graphs_.empty()) return afterGraphs_.push_back(block);  // an event would be recorded, too
  Awaited awaited{block, {}};
  for (const c10::Stream& stream : std::exchange(block->uses, {})) {
    auto event = devices().createEvent(stream.device_index());
    // Fails once the context is lost. Then no stream uses the memory any more.
    if (event.ok() && (*event)->record(nativeStream(stream)).ok())
      awaited.uses.push_back(std::move(*event));
  }
  awaited_.push_back(std::move(awaited));
}

void Allocator::cache(Block* block) {
  Stats& stats = stats_[block->stream.device_index()];
  stats.active[0].decrease(1);
  stats.active_bytes[0].decrease(block->memory.size());
  block->isOverwritten = false;
  cached_.insert({{keyOf(block->stream), block->graph, block->memory.size()}, block});
}

void Allocator::cachePassed() {
  const auto first = std::partition(awaited_.begin(), awaited_.end(), [](const Awaited& awaited) {
    return std::any_of(awaited.uses.begin(), awaited.uses.end(), [](const auto& event) {
      const auto happened = event->hasHappened();
      return happened.ok() && !*happened;
    });
  });
  for (auto passed = first; passed != awaited_.end(); ++passed) cache(passed->block);
  awaited_.erase(first, awaited_.end());
}

void Allocator::giveBack(c10::DeviceIndex device) {
  for (auto next = cached_.begin(); next != cached_.end();) {
    Block* const block = next->second;
    if (block->stream.device_index() != device || block->graph != 0) {
      ++next;
      continue;
    }
    Stats& stats = stats_[device];
    ++stats.num_device_free;
    stats.segment[0].decrease(1);
    stats.reserved_bytes[0].decrease(block->memory.size());
    devices().free(block->memory);
    delete block;
    next = cached_.erase(next);
  }
}

void Allocator::emptyCache(std::pair<unsigned long long, unsigned long long>) {
  const std::lock_guard lock(mutex_);
  cachePassed();
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) giveBack(device);
}

void Allocator::beginGraph(const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  graphs_[keyOf(stream)] = ++lastGraph_;
}

void Allocator::endGraph(const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  graphs_.erase(keyOf(stream));
  if (!graphs_.empty()) return;
  for (Block* const block : std::exchange(afterGraphs_, {})) retire(block);
}

Allocator::Stats Allocator::getDeviceStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  return stats_.at(device);
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  for (auto* const stat : inUse(stats_.at(device))) (*stat)[0].reset_accumulated();
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  for (auto* const stat : inUse(stats_.at(device))) (*stat)[0].reset_peak();
}

// Never destroyed: torch frees memory while the process exits.
Allocator& allocator() {
  static auto* const one = new Allocator;
  return *one;
}

namespace {
const bool isAllocatorRegistered = (c10::SetAllocator(kType, &allocator()), true);
}

}  // namespace fake_device
