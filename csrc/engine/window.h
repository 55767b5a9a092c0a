#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/wait.h"
#include "engine/contract/transfer.h"
#include "engine/engine.h"
#include "engine/line_bell.h"
#include "engine/memory/arena.h"
#include "engine/memory/fence_words.h"
#include "engine/memory/lease_table.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// Symmetric memory of a group: every rank owns a part of the same size that the other ranks can put
// into. A put into a part rings the bell of its owner's line. A window is made in two steps,
// create() and attach(); in between the members exchange their describe() results. Ends with
// retire(), at the latest in its destructor.
class Window {
 public:
  static constexpr size_t kUserOffset = sizeof(Doorbell);  // wires refuse puts before it

  // `bell`: of the line to which the window belongs.
  static Result<std::unique_ptr<Window>> create(std::shared_ptr<Engine> engine, size_t bytes,
                                                std::shared_ptr<LineBell> bell);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Returns the description of this rank's part, for attach() of the other ranks.
  Bytes describe() const;
  // peers[r] is null for this rank itself. parts[r] is the description from rank r. It is empty if
  // rank r was lost before it gave one; nothing of such a rank is ever written or read.
  Status attach(int rank, std::vector<std::shared_ptr<Peer>> peers,
                const std::vector<Bytes>& parts);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  size_t bytes() const { return block_.bytes(); }
  Engine& engine() const { return *engine_; }
  const std::shared_ptr<Engine>& sharedEngine() const { return engine_; }
  const std::shared_ptr<Peer>& peer(int rank) const { return members_[rank].peer; }

  std::byte* local() const { return local_; }
  Doorbell& bell() const { return line_->doorbell(); }
  const std::shared_ptr<LineBell>& line() const { return line_; }
  // Returns the rank's part where load and store reach it (always for our own), else null.
  std::byte* peerPtr(int rank) const { return members_[rank].mapped; }
  // Returns memory of the rank's arena, by its offset there. Null if load and store do not reach
  // it, or if it is not within the arena.
  const std::byte* peerArena(int rank, uint64_t offset, size_t bytes) const;
  // Returns whether network cards reach the rank's memory: Channel::hasCards().
  bool hasCards(int rank) const {
    const auto& peer = members_[rank].peer;
    return peer && !members_[rank].mapped && peer->channel->hasCards();
  }
  // Returns whether memory of devices is mapped, here and at the rank: Channel::mapsDevices().
  bool mapsDevices(int rank) const {
    const auto& peer = members_[rank].peer;
    return peer && peer->channel->mapsDevices();
  }
  // Load and store reach every part, so data that a member published outlives the member.
  bool fullyMapped() const { return fullyMapped_; }

  // Wakes the rank if it sleeps at its doorbell. Call it only where peerPtr() is set; a put rings
  // the bell by itself.
  void ring(int rank) const { members_[rank].bell->ring(); }
  Status put(int rank, uint64_t offset, std::span<const std::byte> data, Signal signal) const;
  // Puts into other memory of a rank that is not mapped; the signal word is in the rank's part.
  Status put(int rank, const RemoteRegion& region, uint64_t offset, std::span<const std::byte> data,
             Signal signal) const;
  // The same by network cards, without a copy of `data`: Channel::write. Call it only where
  // hasCards().
  Status write(int rank, const RemoteRegion& region, uint64_t offset,
               std::span<const std::byte> data, Signal signal, Completion& completion) const;
  // Puts into any part: by a store where load and store reach it, else by put().
  Status place(int rank, uint64_t offset, std::span<const std::byte> data, Signal signal) const;
  // `owner`: the device that owns the target.
  Status get(int rank, const RemoteRegion& region, uint64_t offset, std::span<std::byte> target,
             Completion& completion, const MemoryOwner& owner = {}) const;
  Status get(int rank, std::span<const GetRequest> requests) const;
  // Cancels the gets and writes that count at this completion; all have ended when this returns.
  void cancel(const Completion& completion) const;
  // Channel::retire() and isRetired() of the rank's channel.
  uint64_t retire(int rank, const RemoteRegion& region) const;
  bool isRetired(int rank, uint64_t number) const;

  // We touch this window no more, and our lease ends. Our part and `more` may still be touched by
  // the other ranks. They are reused once each of them has ended its lease, or its process has
  // ended; until then they stay unchanged. A goodbye is not enough, nor is a view without the rank.
  // Call it once.
  void retire(std::vector<RetiredMemory> more = {});

  // Returns whether the rank has fenced us and goes on without us. If so, data that we read from
  // its part may belong to a later operation. Always false where the part is not mapped.
  bool isFencedBy(int rank) const {
    const auto* word = members_[rank].fence;
    return word && (word->load(std::memory_order_acquire) & FenceWords::kFenced) != 0;
  }
  // Null while the rank may still send something.
  const Evidence* disconnection(int rank) const;
  const char* transportName(int rank) const;

 private:
  struct Member {
    std::shared_ptr<Peer> peer;  // null: this rank
    RemoteRegion part;
    std::byte* mapped = nullptr;
    Doorbell* bell = nullptr;                      // of the rank's line, if its arena is mapped
    const std::atomic<uint32_t>* fence = nullptr;  // if its arena is mapped: Channel::fenceWord()
    LeaseTable::Remote lease;  // the rank's lease on this window, if its arena is mapped
  };

  Window() = default;

  std::shared_ptr<Engine> engine_;
  ArenaBlock block_;
  std::shared_ptr<LineBell> line_;
  std::byte* local_ = nullptr;
  MemoryRegion region_;
  LeaseTable::Lease lease_;
  std::vector<Member> members_;
  bool isAttached_ = false;
  int rank_ = 0;
  bool fullyMapped_ = true;
};

}  // namespace mooncake
