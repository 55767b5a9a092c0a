#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/nic/nic.h"

namespace mooncake {

// One stretch of memory, registered with several cards, in pieces that are as long as each card
// takes: MC_MAX_MR_SIZE, or what its device turns out to take. Withdrawn with the last owner.
class NicRegistration {
 public:
  struct Piece {
    uint64_t offset = 0;  // into the memory
    std::unique_ptr<NicMemory> memory;
  };

  std::span<std::byte> memory() const { return memory_; }
  uint32_t access() const { return access_; }
  // In order, without gaps; `card` counts as in the list that the registrations were made for.
  std::span<const Piece> pieces(size_t card) const { return pieces_[card]; }
  // The piece in which an offset lies: an operation must end where it does.
  const Piece& pieceAt(size_t card, uint64_t offset) const;

 private:
  friend class NicRegistrations;
  std::span<std::byte> memory_;
  uint32_t access_ = 0;
  std::vector<std::vector<Piece>> pieces_;
};

// Registers with all cards at once, and the same memory only once for as long as anybody holds it:
// to register costs a page table, and belongs to no single operation. Any thread.
class NicRegistrations {
 public:
  struct Counters {
    uint64_t made = 0;    // stretches
    uint64_t shared = 0;  // asked for again while they were held
    uint64_t pieces = 0;
    uint64_t halvings = 0;  // the device took less than the limit said
  };

  // The cards outlive this and all that is made here.
  explicit NicRegistrations(std::vector<Nic*> cards) : cards_(std::move(cards)) {}

  // On all cards or on none: the first error, in the order of the cards.
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
  mutable std::mutex mutex_;
  std::map<Key, std::weak_ptr<const NicRegistration>> held_;
  std::atomic<uint64_t> made_{0}, shared_{0}, piecesMade_{0}, halvings_{0};
};

}  // namespace mooncake
