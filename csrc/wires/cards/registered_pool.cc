#include "wires/cards/registered_pool.h"

namespace mooncake {

Result<std::unique_ptr<RegisteredPool>> RegisteredPool::create(
    std::span<const std::unique_ptr<Nic>> nics, size_t count, size_t bytes) {
  auto buffers = PacketPool::create(count, bytes, nics.size() * kScratchBytes);
  if (!buffers.ok()) return buffers.error();
  std::unique_ptr<RegisteredPool> pool(new RegisteredPool(std::move(*buffers)));
  for (const auto& nic : nics) {
    auto memory = pool->registerWith(*nic);
    if (!memory.ok()) return memory.error();
    pool->registered_.push_back(std::move(*memory));
  }
  return pool;
}

Result<std::unique_ptr<NicMemory>> RegisteredPool::registerWith(Nic& nic) const {
  return nic.registerMemory(buffers_->memory(), static_cast<uint32_t>(NicAccess::kLocal));
}

}  // namespace mooncake
