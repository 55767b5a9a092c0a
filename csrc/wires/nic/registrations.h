#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "wires/nic/nic.h"

namespace mooncake {

// One range of memory, registered with several cards. Each card gets pieces of the length that it
// takes: MC_MAX_MR_SIZE, or less if the device refuses that. Withdrawn when the last owner is gone.
class NicRegistration {
 public:
  struct Piece {
    uint64_t offset = 0;  // into the memory
    std::unique_ptr<NicMemory> memory;
  };

  std::span<std::byte> memory() const { return memory_; }
  uint32_t access() const { return access_; }
  // Returns the card's pieces, in order and without gaps. `card` is an index into the card list of
  // NicRegistrations.
  std::span<const Piece> pieces(size_t card) const { return pieces_[card]; }
  // Returns the piece that holds the offset. An operation must not reach beyond the piece.
  const Piece& pieceAt(size_t card, uint64_t offset) const;

 private:
  friend class NicRegistrations;
  std::span<std::byte> memory_;
  uint32_t access_ = 0;
  std::vector<std::vector<Piece>> pieces_;
};

// Registers with all cards at once. A range that is still held is not registered again, because a
// registration costs a page table and may serve many operations. Any thread.
class NicRegistrations {
 public:
  struct Counters {
    uint64_t made = 0;    // ranges registered
    uint64_t shared = 0;  // requests for a range that was still held
    uint64_t pieces = 0;
    uint64_t halvings = 0;  // the device took less than its limit
  };

  // The cards outlive this object and all of its registrations.
  explicit NicRegistrations(std::vector<Nic*> cards) : cards_(std::move(cards)) {}

  // Registers on all cards or on none. Returns the first error, in the order of the cards.
  Result<std::shared_ptr<const NicRegistration>> add(std::span<std::byte> memory, uint32_t access);
  Counters counters() const;

 private:
  struct Key {
    std::byte* data;
    size_t bytes;
    uint32_t access;
    auto operator<=>(const Key&) const = default;
  };

  Status registerWith(Nic& card, NicRegistration& registration,
                      std::vector<NicRegistration::Piece>& pieces);

  const std::vector<Nic*> cards_;
  mutable Mutex mutex_;
  std::map<Key, std::weak_ptr<const NicRegistration>> held_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> made_{0}, shared_{0}, piecesMade_{0}, halvings_{0};
};

}  // namespace mooncake
