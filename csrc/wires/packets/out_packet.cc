#include "wires/packets/out_packet.h"

#include <cstring>
#include <utility>

namespace mooncake {

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
