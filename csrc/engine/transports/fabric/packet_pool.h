#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/nic/nic.h"
#include "engine/transports/fabric/fair_shares.h"

namespace mooncake {

// Buffers of one size, registered once with every card: what is copied into one may leave over any
// of them. Pages cost nothing until they are touched, and the buffer that came back last is the
// next one. Channels share them: FairShares. Any thread.
class PacketPool {
 public:
  // Number of buffers that only urgent packets take, where a channel has its share of the others.
  // Urgent ones give room: without them, two ends with full pools would wait for each other's
  // acknowledgements.
  static constexpr size_t kReserve = 32;

  // The buffers that one channel holds. Goes before the pool, and after its packets.
  class Share {
   public:
    explicit Share(PacketPool& pool);
    ~Share();
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

   private:
    friend class PacketPool;
    PacketPool& pool_;
    FairShares::Owner owner_;  // guarded by the pool's lock, as `urgent_`
    size_t urgent_ = 0;        // of the reserve
  };
  struct Buffer {
    std::byte* at = nullptr;  // null: none is left for this share
    bool isOfReserve = false;
  };

  static Result<std::unique_ptr<PacketPool>> create(std::span<const std::unique_ptr<Nic>> nics,
                                                    size_t count, size_t bytes);
  ~PacketPool();

  size_t bufferBytes() const { return bytes_; }
  Buffer take(Share& share, bool isUrgent = false);
  void giveBack(Share& share, Buffer buffer);
  // The buffer of that index, for a pool without shares.
  std::byte* at(size_t index) const { return base_ + index * bytes_; }
  // As one card knows it.
  NicBuffer as(size_t rail, std::byte* at, size_t bytes) const {
    return {{at, bytes}, registered_[rail].get()};
  }
  // For a card that takes the place of another one, and when it does.
  Result<std::unique_ptr<NicMemory>> registerWith(Nic& nic) const;
  void renew(size_t rail, std::unique_ptr<NicMemory> memory) {
    registered_[rail] = std::move(memory);
  }
  // The cards go: nothing is registered any more.
  void unregister() { registered_.clear(); }

 private:
  PacketPool(std::byte* base, size_t count, size_t bytes);

  std::byte* const base_;
  const size_t count_, bytes_;
  std::vector<std::unique_ptr<NicMemory>> registered_;  // by card
  mutable std::mutex mutex_;                            // guards what follows
  std::vector<uint32_t> free_;
  FairShares shares_;
  size_t reserve_ = kReserve;  // of it, buffers that are free
};

// One packet as it leaves, in a buffer of its channel's share. The buffer goes back to the pool
// when neither a card nor the channel needs it, or when the packet moves out.
class OutPacket {
 public:
  // Null: no buffer is left for this share.
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

  // A card has it, or may have it; not any more. The first under the channel's lock.
  void enterCard() { cards_.fetch_add(1, std::memory_order_relaxed); }
  void leaveCard() { cards_.fetch_sub(1, std::memory_order_release); }
  // Copies the packet to memory of its own and gives the buffer back. Returns whether it did: not
  // while a card has the packet. Under the channel's lock, as moveIn().
  bool moveOut();
  // Copies it into a buffer again, if it has none. False: none is left.
  bool moveIn();

 private:
  PacketPool& pool_;
  PacketPool::Share& share_;
  PacketPool::Buffer buffer_;  // null: the packet has moved out
  Bytes moved_;
  std::atomic<uint32_t> cards_{0};
};

}  // namespace mooncake
