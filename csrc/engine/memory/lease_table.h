#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "engine/memory/arena.h"

namespace mooncake {

// Tells the peers that map our arena which windows this engine still uses: one word for each
// window, in the arena. While a lease lasts, we read and write the other ranks' parts of that
// window. We end it after our last access, and only then do their owners reuse that memory. The
// word is ours, so a fenced rank ends its leases without a store into other ranks' memory.
class LeaseTable {
 public:
  static constexpr uint32_t kMost = 4096;  // windows at a time

  // A peer's lease, as the peer described it.
  struct Remote {
    uint64_t offset = 0;  // of the word, in the peer's arena
    uint64_t turn = 0;    // value of the word until the lease has ended
  };

  // The destructor ends it. Must not outlive the table.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease() { end(); }
    Remote describe() const;
    void end();

   private:
    friend class LeaseTable;
    Lease(LeaseTable& table, uint32_t index) : table_(&table), index_(index) {}
    LeaseTable* table_ = nullptr;
    uint32_t index_ = 0;
  };

  static Result<std::unique_ptr<LeaseTable>> create(Arena& arena);

  // kExhausted: kMost leases are held.
  Result<Lease> take() EXCLUDES(mutex_);

  // `arena` is mapped here. If true, everything that the peer did under the lease happened
  // before.
  static bool hasEnded(const Remote& lease, const std::byte* arena) {
    const auto& word = *reinterpret_cast<const std::atomic<uint64_t>*>(arena + lease.offset);
    return word.load(std::memory_order_acquire) != lease.turn;
  }
  static bool liesIn(const Remote& lease, uint64_t arenaBytes) {
    return lease.offset % alignof(std::atomic<uint64_t>) == 0 && arenaBytes >= sizeof(uint64_t) &&
           lease.offset <= arenaBytes - sizeof(uint64_t);
  }

 private:
  explicit LeaseTable(ArenaBlock block) : block_(std::move(block)) {}
  std::atomic<uint64_t>& at(uint32_t index) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(block_.data())[index];
  }

  // The words start as zeros and are not released before the engine ends. Each counts the leases
  // that have ended there.
  const ArenaBlock block_;
  Mutex mutex_;
  uint32_t used_ GUARDED_BY(mutex_) = 0;
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
