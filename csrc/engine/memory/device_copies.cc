#include "engine/memory/device_copies.h"

#include <algorithm>
#include <string>
#include <utility>

namespace mooncake {

DeviceCopies::~DeviceCopies() {
  for (const auto& device : devices_) {
    // An error means that the context is lost: then no copy runs any more.
    if (device->isWorking()) (void)device->owner.accelerator->synchronize(device->stream);
    close(*device);
  }
}

void DeviceCopies::prepare(Accelerator& accelerator) {
  constexpr size_t kDirections = 2, kConnections = 16;
  std::vector<std::span<std::byte>> all;
  while (all.size() < kDirections * kConnections) {
    const auto memory = accelerator.allocatePinned(kBuffers * kBufferBytes);
    if (!memory.ok()) break;  // a transfer that lacks memory says so
    all.push_back(*memory);
  }
  for (const auto& memory : all) accelerator.freePinned(memory);
}

bool DeviceCopies::Device::isWorking() const {
  return std::ranges::any_of(
      copies, [](const Copy& copy) { return copy.state_ == Copy::State::kUnderWay; });
}

DeviceCopies::Device* DeviceCopies::find(const MemoryOwner& owner) const {
  const auto found = std::find_if(devices_.begin(), devices_.end(),
                                  [&](const auto& device) { return device->owner == owner; });
  return found == devices_.end() ? nullptr : found->get();
}

Status DeviceCopies::open(Device& device) {
  Accelerator& accelerator = *device.owner.accelerator;
  const auto queues = accelerator.streamQueues(device.owner.device);
  if (!queues.ok()) return queues.status();
  device.queues = *queues;
  const auto memory = accelerator.allocatePinned(kBuffers * kBufferBytes);
  if (!memory.ok()) return memory.status();
  device.memory = *memory;
  for (size_t i = 0; i < kBuffers; ++i) {
    auto event = accelerator.createEvent(device.owner.device);
    if (!event.ok()) {
      close(device);
      return event.status();
    }
    Copy& copy = device.copies[i];
    copy.owner_ = device.owner;
    copy.buffer_ = device.memory.data() + i * kBufferBytes;
    copy.event_ = std::move(*event);
  }
  return {};
}

void DeviceCopies::close(Device& device) {
  for (Copy& copy : device.copies) copy.event_.reset();
  device.owner.accelerator->freePinned(device.memory);
}

Result<DeviceCopies::Copy*> DeviceCopies::lend(const MemoryOwner& owner) {
  Device* device = find(owner);
  if (!device) {
    auto made = std::make_unique<Device>();
    made->owner = owner;
    MOONCAKE_TRY(open(*made));
    device = devices_.emplace_back(std::move(made)).get();
  }
  for (Copy& copy : device->copies) {
    if (copy.isLent_ || copy.state_ == Copy::State::kUnderWay) continue;
    copy.isLent_ = true;
    copy.state_ = Copy::State::kNone;
    return &copy;
  }
  return nullptr;
}

bool DeviceCopies::hasRoom(const MemoryOwner& owner) const {
  const Device* device = find(owner);
  return !device || std::any_of(device->copies.begin(), device->copies.end(), [](const Copy& copy) {
    return !copy.isLent_ && copy.state_ != Copy::State::kUnderWay;
  });
}

void DeviceCopies::giveBack(Copy& copy) { copy.isLent_ = false; }

Status DeviceCopies::toBuffer(Copy& copy, const std::byte* from, size_t bytes, Origin origin) {
  return begin(copy, copy.buffer_, from, bytes, std::move(origin));
}

Status DeviceCopies::fromBuffer(Copy& copy, std::byte* to, size_t bytes, Origin origin) {
  return begin(copy, to, copy.buffer_, bytes, std::move(origin));
}

Status DeviceCopies::begin(Copy& copy, void* to, const void* from, size_t bytes, Origin origin) {
  Accelerator& accelerator = *copy.owner_.accelerator;
  Device& device = *find(copy.owner_);
  if (!device.isWorking()) device.stream = device.queues->prompt();
  const DeviceStream stream = device.stream;
  MOONCAKE_TRY(accelerator.copy(stream, to, from, bytes));
  if (const Status recorded = copy.event_->record(stream); !recorded.ok()) {
    // Nothing else tells when the copy ends. An error here means that it does not run any more.
    (void)accelerator.synchronize(stream);
    return recorded;
  }
  copy.state_ = Copy::State::kUnderWay;
  copy.bytes_ = bytes;
  copy.use_ = std::move(origin.use);
  copy.completion_ = origin.completion;
  copy.transfer_ = origin.transfer;
  ++underWay_;
  return {};
}

void DeviceCopies::end(Copy& copy, const Status& how) {
  copy.state_ = how.ok() ? Copy::State::kDone : Copy::State::kFailed;
  if (!how.ok()) copy.failure_ = how.error();
  copy.use_ = {};
  copy.completion_ = nullptr;
  copy.transfer_ = 0;
  --underWay_;
  ++ended_;
}

void DeviceCopies::look() {
  if (underWay_ == 0) return;
  for (const auto& device : devices_) {
    for (Copy& copy : device->copies) {
      if (copy.state_ != Copy::State::kUnderWay) continue;
      const auto happened = copy.event_->hasHappened();
      if (happened.ok() && !*happened) continue;
      // A copy whose event cannot be asked may still run.
      if (!happened.ok()) (void)device->owner.accelerator->synchronize(device->stream);
      end(copy, happened.status());
    }
  }
}

template <typename Which>
bool DeviceCopies::anyUnderWay(Which&& which) const {
  if (underWay_ == 0) return false;
  return std::any_of(devices_.begin(), devices_.end(), [&](const auto& device) {
    return std::any_of(device->copies.begin(), device->copies.end(), [&](const Copy& copy) {
      return copy.state_ == Copy::State::kUnderWay && which(copy);
    });
  });
}

bool DeviceCopies::isUnderWay(const Completion* completion) const {
  return anyUnderWay([&](const Copy& copy) { return copy.completion_ == completion; });
}

bool DeviceCopies::isUnderWay(uint64_t transfer) const {
  return anyUnderWay([&](const Copy& copy) { return copy.transfer_ == transfer; });
}

void DeviceCopies::free() {
  for (const auto& device : devices_) close(*device);
  devices_.clear();
}

}  // namespace mooncake
