#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/wait.h"
#include "engine/engine.h"
#include "engine/local/fence_words.h"
#include "engine/memory/arena.h"
#include "engine/memory/lease_table.h"
#include "engine/memory/region_table.h"
#include "engine/transfer.h"

namespace mooncake {

// Symmetric memory of a group: every rank owns a part of the same size that the others can put
// into. A part starts with its owner's doorbell. Made in two steps, because the members exchange
// what describe() says in between. Ends with retire(), at the latest in its destructor.
class Window {
 public:
  static constexpr size_t kUserOffset = sizeof(Doorbell);  // where the part's free use begins

  static Result<std::unique_ptr<Window>> create(std::shared_ptr<Engine> engine, size_t bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // This rank's part, for the others' attach().
  Bytes describe() const;
  // peers[r] is null for this rank itself; parts[r] is what rank r described, empty when it was
  // lost before it could: nothing of such a rank is ever written or read.
  Status attach(int rank, std::vector<std::shared_ptr<Peer>> peers,
                const std::vector<Bytes>& parts);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  size_t bytes() const { return block_.bytes(); }
  Engine& engine() const { return *engine_; }
  const std::shared_ptr<Engine>& sharedEngine() const { return engine_; }
  const std::shared_ptr<Peer>& peer(int rank) const { return members_[rank].peer; }

  std::byte* local() const { return local_; }
  Doorbell& bell() const { return *reinterpret_cast<Doorbell*>(local_); }
  // Where load and store reach the rank's part (our own always), else null.
  std::byte* peerPtr(int rank) const { return members_[rank].mapped; }
  // Memory of the rank's arena, by its offset there, where load and store reach it; null where they
  // do not, or where it is not within the arena.
  const std::byte* peerArena(int rank, uint64_t offset, size_t bytes) const;
  // The rank's memory is reached through network cards: Channel::hasCards().
  bool hasCards(int rank) const {
    const auto& peer = members_[rank].peer;
    return peer && !members_[rank].mapped && peer->channel->hasCards();
  }
  // Every part is reached by load and store: what a member published outlives it.
  bool fullyMapped() const { return fullyMapped_; }

  // Wakes the rank if it sleeps at its doorbell. Only where peerPtr() is set: a put rings by
  // itself.
  void ring(int rank) const { reinterpret_cast<Doorbell*>(members_[rank].mapped)->ring(); }
  Status put(int rank, uint64_t offset, std::span<const std::byte> data, Signal signal) const;
  // Into other memory of a rank that is not mapped; the word is in its part.
  Status put(int rank, const RemoteRegion& region, uint64_t offset, std::span<const std::byte> data,
             Signal signal) const;
  // The same by cards, which take it from where it stands: Channel::write. Where hasCards().
  Status write(int rank, const RemoteRegion& region, uint64_t offset,
               std::span<const std::byte> data, Signal signal, Completion& completion) const;
  // Into any part: by store where it is reached by load and store, else as a put.
  Status place(int rank, uint64_t offset, std::span<const std::byte> data, Signal signal) const;
  Status get(int rank, const RemoteRegion& region, uint64_t offset, std::span<std::byte> target,
             Completion& completion) const;
  Status get(int rank, std::span<const GetRequest> requests) const;
  // Every get and write that counts at this completion has ended when this returns.
  void cancel(const Completion& completion) const;

  // We touch nothing of this window any more: our lease ends. Our part, and what else the others
  // may touch, is used again when each of them has ended its own lease, or its process has ended;
  // until then it stays as it is. A goodbye is not enough, nor is a view without the rank. Once.
  void retire(std::vector<RetiredMemory> more = {});

  // The rank goes on without us: what we have read of its part may be of a later operation. Only
  // where it is mapped, else false.
  bool isFencedBy(int rank) const {
    const auto* word = members_[rank].fence;
    return word && (word->load(std::memory_order_acquire) & FenceWords::kFenced) != 0;
  }
  // Null as long as something may come from the rank.
  const Evidence* disconnection(int rank) const;
  const char* transportName(int rank) const;

 private:
  struct Member {
    std::shared_ptr<Peer> peer;  // null: this rank
    RemoteRegion part;
    std::byte* mapped = nullptr;
    const std::atomic<uint32_t>* fence = nullptr;  // where it is mapped: Channel::fenceWord()
    LeaseTable::Remote lease;                      // of the rank on this window, where it is mapped
  };

  Window() = default;

  std::shared_ptr<Engine> engine_;
  ArenaBlock block_;
  std::byte* local_ = nullptr;
  MemoryRegion region_;
  LeaseTable::Lease lease_;
  std::vector<Member> members_;
  bool isAttached_ = false;
  int rank_ = 0;
  bool fullyMapped_ = true;
};

}  // namespace mooncake
