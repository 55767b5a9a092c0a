#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/wait.h"
#include "device/memory_owner.h"
#include "engine/memory/arena.h"

namespace mooncake {

// What a peer needs to reach memory registered here. Wire form: three u64 in this order.
struct RemoteRegion {
  uint64_t address = 0;  // virtual address in the owner's process: cross-memory attach reads there
  uint64_t bytes = 0;
  uint64_t key = 0;  // names the registration; 0: nothing registered
};

// Entries of one table: 64 Ki for the program's regions, and 4 Ki for operations. Unused entries
// cost address space only.
constexpr size_t kRegionCapacity = (size_t(64) + 4) << 10;

enum RegionRights : uint32_t {
  kRemoteRead = 1,
  kRemoteWrite = 2,
  kLasting = 4,  // not a right: the memory is long-lived, so costly preparations for it pay
  // Not a right of a key: cards of peers may write into this long-lived memory if they were asked
  // to.
  kLanding = 8,
  // Not a right: the program owns the memory and may unmap it (engine/memory/program_memory.h).
  kOfProgram = 16,
  // Not a right: a device owns the memory, and only the owner's engine reaches it. add() sets it.
  kOfDevice = 32,
  // Not a right: DeviceExports tells peers of the host how to map the memory. add() sets it.
  kExported = 64,
  // Not a right: a peer's card that has written to this long-lived memory has to read from it before
  // it reports the bytes. Otherwise a kernel that runs may see a count of the bytes ahead of the
  // bytes (Accelerator::ordersCardWrites). add() sets it.
  kReadBack = 128,
};

// Prepares long-lived memory: registers it with network cards.
class RegionWatcher {
 public:
  virtual ~RegionWatcher() = default;
  // Called before any peer can know the key.
  virtual void onAdded(uint64_t key, std::span<std::byte> memory, uint32_t rights) = 0;
  // Called when the key is refused and no transfer uses the memory through the table any more. When
  // this returns, no card reaches the memory either.
  virtual void onRevoked(uint64_t key) = 0;
};

class DeviceExports;  // engine/memory/device_exports.h
class RegionTable;

// Memory that peers may reach while this object lives. Its destructor revokes the key. It returns
// only when no transfer that went through the table touches the memory any more. Answers under way
// end when they are sent. So if a peer may have stopped reading, cancel or close the channels
// first.
class MemoryRegion {
 public:
  MemoryRegion() = default;
  MemoryRegion(MemoryRegion&& other) noexcept;
  MemoryRegion& operator=(MemoryRegion&& other) noexcept;
  ~MemoryRegion();

  RemoteRegion remote() const { return remote_; }
  explicit operator bool() const { return table_ != nullptr; }
  // Lets peers that reach it without our help do so for ever. Call it only when nothing else of the
  // table is used any more.
  void abandon() { table_ = nullptr; }

 private:
  friend class RegionTable;
  MemoryRegion(RegionTable* table, RemoteRegion remote) : table_(table), remote_(remote) {}

  RegionTable* table_ = nullptr;
  RemoteRegion remote_;
};

// The keys that are valid now, in memory that peers map. A peer that reaches a region without the
// owner's help (load and store, or cross-memory attach) applies the owner's checks itself. It
// checks before it touches anything and again after a read, so that bytes of memory that was
// released half-way never count. Only the owner writes it, and never relies on its content.
class RegionMirror {
 public:
  bool allows(uint64_t key, uint32_t right) const;
  // Returns whether a device owns the region's memory, so that its engine must be asked.
  bool isOfDevice(uint64_t key) const { return allows(key, kOfDevice); }
  // Returns the place in the arena of the bell that a put into the region rings; 0: it is at the
  // start of the region. Another region's, if the key was revoked meanwhile.
  uint64_t bellOf(uint64_t key) const;
  // Returns the entry of DeviceExports for the region; nothing if there is none.
  std::optional<size_t> exportOf(uint64_t key) const;

 private:
  friend class RegionTable;
  // One word per entry: generation << 32 | rights; 0: nothing is registered. All zeros mirror an
  // empty table.
  std::array<std::atomic<uint64_t>, kRegionCapacity> words_;
  // The bell of each entry: its offset in the arena; 0: at the start of the region.
  std::array<std::atomic<uint64_t>, kRegionCapacity> bells_;
};

// The owner's side of every remote access. A request names a key and a range. The table says
// whether that range may be touched, and keeps it alive meanwhile. Entries are created in blocks
// when first needed, and never freed. open() allocates nothing and takes no lock: each entry is one
// word, generation << 32 | closed << 31 | users.
class RegionTable {
 public:
  static constexpr size_t kCapacity = kRegionCapacity;

  RegionTable() = default;
  ~RegionTable();

  // `bell`: the bell in the arena that puts into the region ring, which lives as long as the
  // region; null: the region begins with its bell, if puts come to it. kExhausted: every entry is
  // taken.
  Result<MemoryRegion> add(void* address, size_t bytes, uint32_t rights, MemoryOwner owner = {},
                           Doorbell* bell = nullptr);
  // Adds memory of a device that DescriptorOffers offers, for peers to read. Asks no driver. The same
  // error.
  Result<MemoryRegion> addOffered(std::span<std::byte> memory, const MemoryOwner& owner,
                                  const ExportedMemory& offer);

  // Holds a range of a region open until it is destroyed.
  class Use {
   public:
    Use() = default;
    Use(Use&& other) noexcept;
    Use& operator=(Use&& other) noexcept;
    ~Use();
    std::byte* data() const { return data_; }
    Doorbell& bell() const { return *bell_; }
    bool isOfProgram() const { return isOfProgram_; }
    const MemoryOwner& owner() const {
      return owner_;
    }  // a device: data() is not for load and store
    explicit operator bool() const { return table_ != nullptr; }

   private:
    friend class RegionTable;
    RegionTable* table_ = nullptr;
    size_t entry_ = 0;
    std::byte* data_ = nullptr;
    Doorbell* bell_ = nullptr;
    bool isOfProgram_ = false;
    MemoryOwner owner_;
  };
  // Returns an empty Use and counts the refusal in these cases: the key is unknown or revoked, the
  // range leaves the region (also by overflow), or the right is missing.
  Use open(uint64_t key, uint64_t offset, uint64_t bytes, uint32_t right);

  // Keeps a mirror in the arena from now on. Returns its offset, always the same one. The arena
  // outlives the table.
  Result<uint64_t> mirrorIn(Arena& arena) EXCLUDES(mutex_);
  // Lets peers of the host map memory of devices that is registered from now on: memory of
  // addOffered(), and with `all` all other memory, too. Returns the offset of DeviceExports in the
  // arena, always the same one.
  Result<uint64_t> exportIn(Arena& arena, bool all) EXCLUDES(mutex_);

  // Tells the watcher about long-lived regions from now on, on the threads that add and revoke.
  // unwatch() waits for calls under way.
  void watch(RegionWatcher& watcher) EXCLUDES(watchersMutex_);
  void unwatch(RegionWatcher& watcher) EXCLUDES(watchersMutex_);

  uint64_t refusals() const { return refusals_.load(std::memory_order_relaxed); }

 private:
  friend class MemoryRegion;
  static constexpr uint64_t kUnused = uint64_t(1) << 31;  // closed, and of no generation
  struct Entry {
    std::atomic<uint64_t> word{kUnused};
    std::byte* address = nullptr;
    uint64_t bytes = 0;
    uint32_t rights = 0;
    MemoryOwner owner;
    Doorbell* bell = nullptr;  // see add()
  };
  static constexpr size_t kBlockEntries = 1024;
  using Block = std::array<Entry, kBlockEntries>;
  Entry& entry(size_t index) const {
    return (*blocks_[index / kBlockEntries].load(std::memory_order_acquire))[index % kBlockEntries];
  }
  void revoke(uint64_t key) EXCLUDES(mutex_);
  void release(size_t entry);
  void mirror(size_t entry, uint64_t word) REQUIRES(mutex_);
  void mirrorBell(size_t entry) REQUIRES(mutex_);
  Result<MemoryRegion> insert(std::span<std::byte> memory, uint32_t rights, MemoryOwner owner,
                              const std::optional<ExportedMemory>& exported,
                              Doorbell* bell = nullptr) EXCLUDES(mutex_);
  std::optional<ExportedMemory> exported(void* address, size_t bytes, const MemoryOwner& owner);

  std::array<std::atomic<Block*>, kCapacity / kBlockEntries> blocks_{};
  std::atomic<size_t> made_{0};  // number of entries in blocks
  std::atomic<uint64_t> refusals_{0};
  std::atomic<DeviceExports*> exports_{nullptr};  // in exported_
  std::atomic<bool> exportsAll_{false};
  SharedMutex watchersMutex_;  // keeps the watchers alive in calls
  std::vector<RegionWatcher*> watchers_ GUARDED_BY(watchersMutex_);
  Doorbell unused_;  // rung when the last user of a closed entry has left
  Mutex mutex_;      // also held while entries are added and closed
  std::vector<uint32_t> freeEntries_ GUARDED_BY(mutex_);
  ArenaBlock mirror_ GUARDED_BY(mutex_);
  const std::byte* arena_ GUARDED_BY(mutex_) = nullptr;  // start of the arena of mirror_
  ArenaBlock exported_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
