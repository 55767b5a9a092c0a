#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/nic/nic.h"

namespace mooncake {

// Buffers of one size, registered once with every card: what is copied into one may leave over any
// of them. Pages cost nothing until they are touched, and the buffer that came back last is the
// next one. Any thread.
class PacketPool {
 public:
  // Nobody takes the last so many but for what gives room to others: or two ends whose pools are
  // full of packets would wait for each other's acknowledgements.
  static constexpr size_t kReserve = 32;

  static Result<std::unique_ptr<PacketPool>> create(std::span<const std::unique_ptr<Nic>> nics,
                                                    size_t count, size_t bytes);
  ~PacketPool();

  size_t bufferBytes() const { return bytes_; }
  std::byte* take(bool isUrgent = false);  // null: none is left
  void giveBack(std::byte* buffer);
  bool hasRoom() const;
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
  mutable std::mutex mutex_;                            // guards free_
  std::vector<uint32_t> free_;
};

// One packet as it leaves. Goes back to the pool when neither a card nor a channel needs it.
class OutPacket {
 public:
  OutPacket(PacketPool& pool, std::byte* buffer) : pool_(pool), buffer_(buffer) {}
  ~OutPacket() { pool_.giveBack(buffer_); }
  OutPacket(const OutPacket&) = delete;
  OutPacket& operator=(const OutPacket&) = delete;

  std::byte* data() const { return buffer_; }
  std::span<const std::byte> bytes() const { return {buffer_, length}; }
  size_t length = 0;

 private:
  PacketPool& pool_;
  std::byte* const buffer_;
};

}  // namespace mooncake
