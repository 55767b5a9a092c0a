#include "engine/transports/fabric/packet_pool.h"

#include <cerrno>
#include <sys/mman.h>

namespace mooncake {

PacketPool::PacketPool(std::byte* base, size_t count, size_t bytes)
    : base_(base), count_(count), bytes_(bytes) {
  free_.reserve(count);
  for (size_t i = count; i > 0; --i) free_.push_back(static_cast<uint32_t>(i - 1));
}

Result<std::unique_ptr<PacketPool>> PacketPool::create(std::span<const std::unique_ptr<Nic>> nics,
                                                       size_t count, size_t bytes) {
  void* base =
      ::mmap(nullptr, count * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return systemError("mmap of packet buffers", errno);
  // Cards may write there behind the back of a child.
  ::madvise(base, count * bytes, MADV_DONTFORK);
  std::unique_ptr<PacketPool> pool(new PacketPool(static_cast<std::byte*>(base), count, bytes));
  for (const auto& nic : nics) {
    auto memory = pool->registerWith(*nic);
    if (!memory.ok()) return memory.error();
    pool->registered_.push_back(std::move(*memory));
  }
  return pool;
}

PacketPool::~PacketPool() {
  registered_.clear();
  ::munmap(base_, count_ * bytes_);
}

Result<std::unique_ptr<NicMemory>> PacketPool::registerWith(Nic& nic) const {
  return nic.registerMemory({base_, count_ * bytes_}, static_cast<uint32_t>(NicAccess::kLocal));
}

std::byte* PacketPool::take(bool isUrgent) {
  std::lock_guard lock(mutex_);
  if (free_.size() <= (isUrgent ? 0 : kReserve)) return nullptr;
  const size_t index = free_.back();
  free_.pop_back();
  return base_ + index * bytes_;
}

void PacketPool::giveBack(std::byte* buffer) {
  std::lock_guard lock(mutex_);
  free_.push_back(static_cast<uint32_t>(static_cast<size_t>(buffer - base_) / bytes_));
}

bool PacketPool::hasRoom() const {
  std::lock_guard lock(mutex_);
  return free_.size() > kReserve;
}

}  // namespace mooncake
