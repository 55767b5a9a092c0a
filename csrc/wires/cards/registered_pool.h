#pragma once

#include <memory>
#include <span>
#include <vector>

#include "wires/nic/nic.h"
#include "wires/packets/packet_pool.h"

namespace mooncake {

// A PacketPool that is registered once with each of some cards: bytes in one of its buffers may go
// over any of them. The registrations change only on the polling thread of the card, under the lock
// of its rail.
class RegisteredPool {
 public:
  static Result<std::unique_ptr<RegisteredPool>> create(std::span<const std::unique_ptr<Nic>> nics,
                                                        size_t count, size_t bytes);

  PacketPool& buffers() { return *buffers_; }
  const PacketPool& buffers() const { return *buffers_; }
  // Returns these bytes of a buffer, as card `card` knows them.
  NicBuffer as(size_t card, std::byte* at, size_t bytes) const {
    return {{at, bytes}, registered_[card].get()};
  }
  // Returns memory that card `card` may read into and whose content nothing uses, at most 8 bytes.
  NicBuffer scratch(size_t card, size_t bytes) const {
    return as(card, buffers_->spare() + card * kScratchBytes, bytes);
  }
  // Registers the memory with a card that is to take another one's place, and puts it there.
  Result<std::unique_ptr<NicMemory>> registerWith(Nic& nic) const;
  void renew(size_t card, std::unique_ptr<NicMemory> memory) {
    registered_[card] = std::move(memory);
  }
  // Ends all registrations, before the cards are destroyed.
  void unregister() { registered_.clear(); }

 private:
  static constexpr size_t kScratchBytes = 8;  // of each card

  explicit RegisteredPool(std::unique_ptr<PacketPool> buffers) : buffers_(std::move(buffers)) {}

  const std::unique_ptr<PacketPool> buffers_;
  std::vector<std::unique_ptr<NicMemory>> registered_;  // by card
};

}  // namespace mooncake
