#include "engine/memory/message_pools.h"

#include <cerrno>
#include <fcntl.h>

#include "engine/memory/device_copies.h"

namespace mooncake {

Result<MessagePools::Device> MessagePools::of(const MemoryOwner& device) {
  Lock lock(mutex_);
  const auto key = std::pair(device.accelerator, device.device);
  const auto known = devices_.find(key);
  return known != devices_.end() ? known->second
                                 : devices_.emplace(key, make(device)).first->second;
}

Result<MessagePools::Device> MessagePools::make(const MemoryOwner& device) {
  if (!offers_) {
    auto offers = DescriptorOffers::start(loop_);
    if (!offers.ok()) return offers.error();
    offers_ = std::move(*offers);
  }
  Device made;
  for (auto* const pool : {&made.sends, &made.receives}) {
    auto shared = SharedPool::make(*device.accelerator, device.device, bytes_);
    if (!shared.ok()) return shared.error();
    *pool = std::move(*shared);
  }
  Fd copy(::fcntl(made.sends->descriptor().get(), F_DUPFD_CLOEXEC, 0));
  if (!copy) return systemError("fcntl(F_DUPFD_CLOEXEC)", errno);
  made.offer = {.handle = offers_->handle(),
                .allocation = offers_->add(std::move(copy)),
                .offset = 0,
                .bytes = made.sends->memory().size(),
                .isOffered = true};
  // For peers that take a message into host memory.
  DeviceCopies::prepare(*device.accelerator);
  return made;
}

ExportedMemory MessagePools::offerOf(const Device& device, std::span<const std::byte> part) {
  ExportedMemory offer = device.offer;
  offer.offset = uint64_t(part.data() - device.sends->memory().data());
  offer.bytes -= offer.offset;
  return offer;
}

}  // namespace mooncake
