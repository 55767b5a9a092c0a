#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <vector>

#include "base/result.h"
#include "base/wait.h"
#include "engine/memory/arena.h"

namespace mooncake {

// What a peer needs to reach memory that was registered here. Wire form: three u64 in this order.
struct RemoteRegion {
  uint64_t address = 0;  // virtual address in the owner's process: cross-memory attach reads there
  uint64_t bytes = 0;
  uint64_t key = 0;  // names the registration; 0 = nothing registered
};

// Of one table: 64 Ki for a program's own, and some for operations. What is not used costs nothing
// but addresses.
constexpr size_t kRegionCapacity = (size_t(64) + 4) << 10;

enum RegionRights : uint32_t {
  kRemoteRead = 1,
  kRemoteWrite = 2,
  kLasting = 4,  // no right: the memory stays for long, so that what is costly to make for it pays
  // No right of a key: of memory that lasts, peers' cards may write there what they were asked for.
  kLanding = 8,
  // No right: the memory is the program's, which may unmap it (engine/memory/program_memory.h).
  kOfProgram = 16,
};

// Who makes something for memory that lasts: registers it with network cards.
class RegionWatcher {
 public:
  virtual ~RegionWatcher() = default;
  // Before anybody can know the key.
  virtual void onAdded(uint64_t key, std::span<std::byte> memory, uint32_t rights) = 0;
  // The key is refused, and nobody uses the memory through the table any more. When this returns
  // nobody reaches it in any other way.
  virtual void onRevoked(uint64_t key) = 0;
};

class RegionTable;

// Memory that peers may reach, for as long as this object lives. Its destructor revokes the key and
// returns only when no transfer that went through the table touches the memory any more: answers
// under way end when they are sent, so cancel or close the channels first where a peer may have
// stopped reading.
class MemoryRegion {
 public:
  MemoryRegion() = default;
  MemoryRegion(MemoryRegion&& other) noexcept;
  MemoryRegion& operator=(MemoryRegion&& other) noexcept;
  ~MemoryRegion();

  RemoteRegion remote() const { return remote_; }
  explicit operator bool() const { return table_ != nullptr; }
  // Peers that need no help of ours to reach it may do so for ever. Only when nothing else of the
  // table is used any more.
  void abandon() { table_ = nullptr; }

 private:
  friend class RegionTable;
  MemoryRegion(RegionTable* table, RemoteRegion remote) : table_(table), remote_(remote) {}

  RegionTable* table_ = nullptr;
  RemoteRegion remote_;
};

// Which keys are valid now, in memory that peers map. A peer that reaches a region without the
// owner's help (by load and store, or by cross-memory attach) refuses itself what the owner would
// refuse: it looks before it touches anything, and after a read once more, so that bytes of memory
// that was let go of half way never count. Written by the owner only, which never believes what
// stands here.
class RegionMirror {
 public:
  bool allows(uint64_t key, uint32_t right) const;

 private:
  friend class RegionTable;
  // Per entry: generation << 32 | rights; 0: nothing is registered. Zeros are a mirror of an empty
  // table.
  std::array<std::atomic<uint64_t>, kRegionCapacity> words_;
};

// The owner's side of every remote access: a request names a key and a range; the table says
// whether that range may be touched and keeps it alive while it is. Entries are made in blocks,
// when they are needed first, and never go; open() allocates nothing and takes no lock: each entry
// is one word, generation << 32 | closed << 31 | users.
class RegionTable {
 public:
  static constexpr size_t kCapacity = kRegionCapacity;

  RegionTable() = default;
  ~RegionTable();

  // kExhausted when every entry is taken.
  Result<MemoryRegion> add(void* address, size_t bytes, uint32_t rights);

  // Holds a range of a region open. Ends with the object.
  class Use {
   public:
    Use() = default;
    Use(Use&& other) noexcept;
    Use& operator=(Use&& other) noexcept;
    ~Use();
    std::byte* data() const { return data_; }
    std::byte* regionStart() const { return regionStart_; }
    bool isOfProgram() const { return isOfProgram_; }
    explicit operator bool() const { return table_ != nullptr; }

   private:
    friend class RegionTable;
    RegionTable* table_ = nullptr;
    size_t entry_ = 0;
    std::byte* data_ = nullptr;
    std::byte* regionStart_ = nullptr;
    bool isOfProgram_ = false;
  };
  // Empty when the key is unknown or revoked, the range leaves the region (also by overflow) or the
  // right is missing; the refusal is counted.
  Use open(uint64_t key, uint64_t offset, uint64_t bytes, uint32_t right);

  // Keeps a mirror in the arena from now on and says where; always the same one. The arena outlives
  // the table.
  Result<uint64_t> mirrorIn(Arena& arena);

  // From now on, of regions that last; on the threads that add and revoke. unwatch() waits for
  // calls that are under way.
  void watch(RegionWatcher& watcher);
  void unwatch(RegionWatcher& watcher);

  uint64_t refusals() const { return refusals_.load(std::memory_order_relaxed); }

 private:
  friend class MemoryRegion;
  static constexpr uint64_t kUnused = uint64_t(1) << 31;  // closed, in no generation
  struct Entry {
    std::atomic<uint64_t> word{kUnused};
    std::byte* address = nullptr;
    uint64_t bytes = 0;
    uint32_t rights = 0;
  };
  static constexpr size_t kBlockEntries = 1024;
  using Block = std::array<Entry, kBlockEntries>;
  Entry& entry(size_t index) const {
    return (*blocks_[index / kBlockEntries].load(std::memory_order_acquire))[index % kBlockEntries];
  }
  void revoke(uint64_t key);
  void release(size_t entry);
  void mirror(size_t entry, uint64_t word);

  std::array<std::atomic<Block*>, kCapacity / kBlockEntries> blocks_{};
  std::atomic<size_t> made_{0};  // entries in blocks
  std::atomic<uint64_t> refusals_{0};
  std::shared_mutex watchersMutex_;  // guards watchers_, and them
  std::vector<RegionWatcher*> watchers_;
  Doorbell unused_;   // rung when the last user of a closed entry left
  std::mutex mutex_;  // guards what follows; adding and closing entries
  std::vector<uint32_t> freeEntries_;
  ArenaBlock mirror_;
};

}  // namespace mooncake
