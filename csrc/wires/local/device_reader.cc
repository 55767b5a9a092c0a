#include "wires/local/device_reader.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/log.h"
#include "device/peer_memory.h"
#include "device/stream_queues.h"

namespace mooncake {
namespace {

// Most copies under way at a time.
constexpr size_t kMostCopies = 1024;
// Most mappings of the peer's memory, with the ones that could not be made.
constexpr size_t kMostMappings = 4096;

}  // namespace

class DeviceReader::Mapping {
 public:
  // Maps the whole allocation, as other regions may lie in it. `descriptor`: of offered memory.
  static Result<std::shared_ptr<const Mapping>> make(const ExportedMemory& memory,
                                                     const MemoryOwner& owner,
                                                     const Fd* descriptor) {
    Accelerator& accelerator = *owner.accelerator;
    const size_t bytes = memory.offset + memory.bytes;
    if (descriptor) {
      PeerMemory* const shared = accelerator.peerMemory();
      if (!shared) return Error{ErrorCode::kUnsupported, "the device shares no memory"};
      const auto mapped = shared->mapShared(*descriptor, bytes, owner.device);
      if (!mapped.ok()) return mapped.error();
      return std::make_shared<const Mapping>(accelerator, *mapped, true);
    }
    const auto mapped = accelerator.importMemory(
        {.handle = memory.handle, .allocation = memory.allocation, .offset = 0, .bytes = bytes},
        owner.device);
    if (!mapped.ok()) return mapped.error();
    return std::make_shared<const Mapping>(
        accelerator, std::span(static_cast<std::byte*>(*mapped), bytes), false);
  }
  Mapping(Accelerator& accelerator, std::span<std::byte> memory, bool isOffered)
      : accelerator_(accelerator), memory_(memory), isOffered_(isOffered) {}
  ~Mapping() {
    const Status closed = isOffered_ ? accelerator_.peerMemory()->unmapShared(memory_)
                                     : accelerator_.closeMemory(memory_.data());
    if (!closed.ok())
      log(LogLevel::kWarning, "shm", "a peer's memory stays mapped: ", closed.error().message);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::span<std::byte> memory() const { return memory_; }

 private:
  Accelerator& accelerator_;
  const std::span<std::byte> memory_;  // the allocation
  const bool isOffered_;
};

DeviceReader::DeviceReader(Peer peer, EventLoop& loop)
    : peer_(std::move(peer)),
      watch_(loop, [this] { return look(); }),
      coming_(std::make_shared<ComingMappings>(loop)) {}

DeviceReader::~DeviceReader() = default;

const RegionMirror& DeviceReader::mirror() const {
  return *reinterpret_cast<const RegionMirror*>(peer_.arena->base() + peer_.mirror);
}

const DeviceExports& DeviceReader::exports() const {
  return *reinterpret_cast<const DeviceExports*>(peer_.arena->base() + peer_.exports);
}

Result<ExportedMemory> DeviceReader::exportOf(const RemoteRegion& region) const {
  const Error isNotShared{ErrorCode::kUnsupported, "the peer does not share this memory"};
  const auto entry = mirror().exportOf(region.key);
  if (!entry) return isNotShared;
  ExportedMemory memory = exports().read(*entry);
  if (!mirror().exportOf(region.key))
    return Error{ErrorCode::kRefused, "the peer has unregistered the memory"};
  if (memory.bytes < region.bytes || memory.offset + memory.bytes < memory.offset)
    return isNotShared;
  if (!memory.isOffered && !peer_.mapsHandles) return isNotShared;
  return memory;
}

Result<DeviceReader::Place> DeviceReader::find(const RemoteRegion& region,
                                               const MemoryOwner& owner) {
  const auto memory = exportOf(region);
  if (!memory.ok()) return memory.error();
  const Error isNotShared{ErrorCode::kUnsupported, "the peer does not share this memory"};
  Lock lock(mapMutex_);
  const MappingKey key{memory->handle, memory->allocation, owner.accelerator, owner.device};
  auto found = known_.find(key);
  if (found == known_.end()) {
    forgetRevoked();
    if (known_.size() >= kMostMappings) return isNotShared;
    if (memory->isOffered) return Error{ErrorCode::kInterrupted, "the memory is not here yet"};
    keep(key, Mapping::make(*memory, owner, nullptr));
    found = known_.find(key);
  }
  Known& known = found->second;
  if (known.regions.size() > 64)
    std::erase_if(known.regions, [&](uint64_t one) { return !mirror().exportOf(one); });
  known.regions.insert(region.key);
  if (!known.mapping || known.mapping->memory().size() < memory->offset + region.bytes)
    return isNotShared;
  return Place{known.mapping, known.mapping->memory().data() + memory->offset};
}

void DeviceReader::whenMapped(const RemoteRegion& region, const MemoryOwner& owner,
                              const Completion* completion, Then then) {
  const auto memory = exportOf(region);
  if (!memory.ok()) return then(memory.error());
  coming_->add(
      {*memory, owner}, completion,
      [weak = weak_from_this()](const auto& wanted, const Fd& descriptor) {
        if (const auto self = weak.lock()) self->mapOffered(wanted, descriptor);
      },
      std::move(then));
}

void DeviceReader::mapOffered(const ComingMappings::Wanted& wanted, const Fd& descriptor) {
  Lock lock(mapMutex_);
  if (!known_.contains(wanted.key()))
    keep(wanted.key(), Mapping::make(wanted.memory, wanted.owner, &descriptor));
}

// A mapping that cannot be made is not tried again.
void DeviceReader::keep(const MappingKey& key, Result<std::shared_ptr<const Mapping>> mapping) {
  if (!mapping.ok()) {
    log(LogLevel::kWarning, "shm", "memory of a peer's device cannot be mapped for device ",
        std::get<int>(key), ", and goes through pinned buffers: ", mapping.error().message);
  }
  known_.emplace(key, Known{mapping.ok() ? *mapping : nullptr, {}});
}

// A copy under way keeps its mapping.
void DeviceReader::forgetRevoked() {
  for (auto it = known_.begin(); it != known_.end();) {
    Known& known = it->second;
    std::erase_if(known.regions, [&](uint64_t one) { return !mirror().exportOf(one); });
    const bool isUsed = known.mapping && known.mapping.use_count() > 1;
    it = known.regions.empty() && !isUsed ? known_.erase(it) : std::next(it);
  }
}

void DeviceReader::begin(Copy copy) {
  Status begun;
  {
    Lock lock(mutex_);
    if (isClosed_) {
      begun = {ErrorCode::kAborted, "the channel is closed"};
    } else if (underWay_.size() == kMostCopies) {
      begun = {ErrorCode::kExhausted,
               std::to_string(kMostCopies) + " copies from a peer's devices are under way"};
    } else {
      UnderWay next{.copy = std::move(copy)};
      begun = enqueue(next);
      if (begun.ok()) {
        underWay_.push_back(std::move(next));
      } else {
        copy = std::move(next.copy);
      }
    }
  }
  if (begun.ok()) return watch_.lookSoon(shared_from_this());
  copy.use = {};
  copy.onEnd(begun);
}

// After an error nothing is under way.
Status DeviceReader::enqueue(UnderWay& next) {
  const Copy& copy = next.copy;
  Accelerator& accelerator = *copy.owner.accelerator;
  const auto name = std::pair(&accelerator, copy.owner.device);
  auto device = devices_.find(name);
  if (device == devices_.end()) {
    const auto queues = accelerator.streamQueues(copy.owner.device);
    if (!queues.ok()) return queues.status();
    device = devices_.emplace(name, Device{.queues = *queues, .stream = {}, .free = {}}).first;
  }
  auto& [queues, stream, underWay, free] = device->second;
  if (underWay == 0) stream = queues->prompt();
  if (free.empty()) {
    auto event = accelerator.createEvent(copy.owner.device);
    if (!event.ok()) return event.status();
    free.push_back(std::move(*event));
  }
  MOONCAKE_TRY(accelerator.copy(stream, copy.target.data(), copy.from.start + copy.offset,
                                copy.target.size()));
  if (const Status recorded = free.back()->record(stream); !recorded.ok()) {
    // An error here means that the copy does not run any more.
    (void)accelerator.synchronize(stream);
    return recorded;
  }
  next.event = std::move(free.back());
  free.pop_back();
  ++underWay;
  return {};
}

// Ends the copies that have happened. Returns how many copies have ended so far.
uint64_t DeviceReader::look() {
  Lock lock(mutex_);
  for (auto it = underWay_.begin(); it != underWay_.end();) {
    UnderWay& one = *it;
    if (one.isEnding) {
      ++it;
      continue;
    }
    const auto happened = one.event->hasHappened();
    if (happened.ok() && !*happened) {
      ++it;
      continue;
    }
    Accelerator& accelerator = *one.copy.owner.accelerator;
    Device& device = devices_.at({&accelerator, one.copy.owner.device});
    // A copy may still run if its event cannot be asked.
    if (!happened.ok()) (void)accelerator.synchronize(device.stream);
    --device.underWay;
    one.isEnding = true;  // it stays in the list until its owner has been told
    lock.unlock();
    one.copy.use = {};
    one.copy.from = {};
    one.copy.onEnd(happened.status());
    lock.lock();
    device.free.push_back(std::move(one.event));
    it = underWay_.erase(it);
    ++ended_;
  }
  if (!underWay_.empty()) watch_.lookSoon(shared_from_this());
  return ended_;
}

void DeviceReader::await(const Completion* completion) {
  coming_->await(completion);
  for (;;) {
    (void)look();
    {
      Lock lock(mutex_);
      if (std::ranges::none_of(
              underWay_, [&](const UnderWay& one) { return one.copy.completion == completion; }))
        return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void DeviceReader::close() {
  coming_->close();
  {
    Lock lock(mutex_);
    isClosed_ = true;
  }
  for (;;) {
    (void)look();
    {
      Lock lock(mutex_);
      if (underWay_.empty()) {
        devices_.clear();
        break;
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  Lock lock(mapMutex_);
  known_.clear();
}

}  // namespace mooncake
