#include "wires/packets/packet_pool.h"

#include <algorithm>
#include <cerrno>
#include <sys/mman.h>

namespace mooncake {

PacketPool::PacketPool(std::byte* base, size_t count, size_t bytes, size_t spareBytes)
    : base_(base),
      count_(count),
      bytes_(bytes),
      spareBytes_(spareBytes),
      shares_(count - std::min(count, kReserve)) {
  free_.reserve(count);
  for (size_t i = count; i > 0; --i) free_.push_back(static_cast<uint32_t>(i - 1));
}

Result<std::unique_ptr<PacketPool>> PacketPool::create(size_t count, size_t bytes,
                                                       size_t spareBytes) {
  const size_t all = count * bytes + spareBytes;
  void* base = ::mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return systemError("mmap of packet buffers", errno);
  // A card could write there without the knowledge of a forked child.
  ::madvise(base, all, MADV_DONTFORK);
  return std::unique_ptr<PacketPool>(
      new PacketPool(static_cast<std::byte*>(base), count, bytes, spareBytes));
}

PacketPool::~PacketPool() { ::munmap(base_, count_ * bytes_ + spareBytes_); }

PacketPool::Share::Share(PacketPool& pool) : pool_(pool) {
  Lock lock(pool_.mutex_);
  pool_.shares_.add(owner_);
}

PacketPool::Share::~Share() {
  Lock lock(pool_.mutex_);
  pool_.shares_.remove(owner_);
}

PacketPool::Buffer PacketPool::take(Share& share, bool isUrgent) {
  Lock lock(mutex_);
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
  Lock lock(mutex_);
  if (buffer.isOfReserve) {
    --share.urgent_;
    ++reserve_;
  } else {
    shares_.giveBack(share.owner_);
  }
  free_.push_back(static_cast<uint32_t>(static_cast<size_t>(buffer.at - base_) / bytes_));
}

}  // namespace mooncake
