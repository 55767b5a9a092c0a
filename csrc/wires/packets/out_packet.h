#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>

#include "base/bytes.h"
#include "wires/packets/packet_pool.h"

namespace mooncake {

// One packet that leaves, in a buffer of its channel's share. The buffer goes back to the pool when
// neither a card nor the channel needs it, or when the packet moves out.
class OutPacket {
 public:
  // Returns null if no buffer is left for this share.
  static std::shared_ptr<OutPacket> make(PacketPool& pool, PacketPool::Share& share,
                                         bool isUrgent = false);
  OutPacket(PacketPool& pool, PacketPool::Share& share, PacketPool::Buffer buffer)
      : pool_(pool), share_(share), buffer_(buffer) {}
  ~OutPacket() {
    if (buffer_.at) pool_.giveBack(share_, buffer_);
  }
  OutPacket(const OutPacket&) = delete;
  OutPacket& operator=(const OutPacket&) = delete;

  std::byte* data() const { return buffer_.at; }
  std::span<const std::byte> bytes() const {
    return {buffer_.at ? buffer_.at : moved_.data(), length};
  }
  size_t length = 0;

  // Counts the cards that may read the packet. enterCard() is called under the channel's lock,
  // leaveCard() on any thread.
  void enterCard() { cards_.fetch_add(1, std::memory_order_relaxed); }
  void leaveCard() { cards_.fetch_sub(1, std::memory_order_release); }
  // Copies the packet to memory of its own and gives the buffer back. Returns false, and does
  // nothing, while a card has the packet. Under the channel's lock.
  bool moveOut();
  // Copies the packet into a buffer again, if it has none. Returns false if no buffer is left.
  // Under the channel's lock.
  bool moveIn();

 private:
  PacketPool& pool_;
  PacketPool::Share& share_;
  PacketPool::Buffer buffer_;  // null: the packet has moved out
  Bytes moved_;
  std::atomic<uint32_t> cards_{0};
};

}  // namespace mooncake
