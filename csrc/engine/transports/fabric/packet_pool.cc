#include "engine/transports/fabric/packet_pool.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <utility>

namespace mooncake {

PacketPool::PacketPool(std::byte* base, size_t count, size_t bytes)
    : base_(base), count_(count), bytes_(bytes), shares_(count - std::min(count, kReserve)) {
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

PacketPool::Share::Share(PacketPool& pool) : pool_(pool) {
  std::lock_guard lock(pool_.mutex_);
  pool_.shares_.add(owner_);
}

PacketPool::Share::~Share() {
  std::lock_guard lock(pool_.mutex_);
  pool_.shares_.remove(owner_);
}

PacketPool::Buffer PacketPool::take(Share& share, bool isUrgent) {
  std::lock_guard lock(mutex_);
  Buffer buffer;
  if (shares_.mayTake(share.owner_)) {
    shares_.take(share.owner_);
  } else if (isUrgent && share.urgent_ < reserve_) {
    ++share.urgent_;
    --reserve_;
    buffer.isOfReserve = true;
  } else {
    return {};
  }
  buffer.at = at(free_.back());
  free_.pop_back();
  return buffer;
}

void PacketPool::giveBack(Share& share, Buffer buffer) {
  std::lock_guard lock(mutex_);
  if (buffer.isOfReserve) {
    --share.urgent_;
    ++reserve_;
  } else {
    shares_.giveBack(share.owner_);
  }
  free_.push_back(static_cast<uint32_t>(static_cast<size_t>(buffer.at - base_) / bytes_));
}

std::shared_ptr<OutPacket> OutPacket::make(PacketPool& pool, PacketPool::Share& share,
                                           bool isUrgent) {
  const auto buffer = pool.take(share, isUrgent);
  return buffer.at ? std::make_shared<OutPacket>(pool, share, buffer) : nullptr;
}

bool OutPacket::moveOut() {
  if (!buffer_.at || cards_.load(std::memory_order_acquire) > 0) return false;
  moved_.assign(buffer_.at, buffer_.at + length);
  pool_.giveBack(share_, std::exchange(buffer_, {}));
  return true;
}

bool OutPacket::moveIn() {
  if (buffer_.at) return true;
  buffer_ = pool_.take(share_);
  if (!buffer_.at) return false;
  std::memcpy(buffer_.at, moved_.data(), length);
  moved_ = {};
  return true;
}

}  // namespace mooncake
