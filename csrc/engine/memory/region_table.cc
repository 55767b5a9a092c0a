#include "engine/memory/region_table.h"

#include <chrono>
#include <string>
#include <utility>

#include "base/log.h"
#include "engine/memory/device_exports.h"

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer does not model fences. The one below publishes no data, so nothing is missed.
#pragma GCC diagnostic ignored "-Wtsan"
#endif

namespace mooncake {
namespace {

// An entry's word: generation << 32 | closed << 31 | users. A key: generation << 32 | (index + 1).
// The generation only grows, and an entry that ran out of generations is never reused. So a revoked
// key is refused for ever, whatever region uses its entry later.
constexpr uint64_t kClosed = uint64_t(1) << 31;
constexpr uint64_t kUsers = kClosed - 1;
constexpr uint64_t kLastGeneration = 0xffffffff;

uint64_t generationOf(uint64_t wordOrKey) { return wordOrKey >> 32; }
// Out of range for key 0 and for invalid keys.
uint64_t indexOf(uint64_t key) { return (key & 0xffffffff) - 1; }

}  // namespace

MemoryRegion::MemoryRegion(MemoryRegion&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)), remote_(std::exchange(other.remote_, {})) {}

MemoryRegion& MemoryRegion::operator=(MemoryRegion&& other) noexcept {
  if (this == &other) return *this;
  if (table_) table_->revoke(remote_.key);
  table_ = std::exchange(other.table_, nullptr);
  remote_ = std::exchange(other.remote_, {});
  return *this;
}

MemoryRegion::~MemoryRegion() {
  if (table_) table_->revoke(remote_.key);
}

RegionTable::~RegionTable() {
  for (auto& block : blocks_) delete block.load(std::memory_order_relaxed);
}

Result<MemoryRegion> RegionTable::add(void* address, size_t bytes, uint32_t rights,
                                      MemoryOwner owner, Doorbell* bell) {
  if (owner) rights |= kOfDevice;
  if (owner && (rights & kLasting) != 0 && !owner.accelerator->ordersCardWrites(owner.device))
    rights |= kReadBack;
  const auto start = reinterpret_cast<uintptr_t>(address);
  if ((!address && bytes != 0) || start + bytes < start) {
    return Error{ErrorCode::kInvalidArgument,
                 "memory to register must not be null and must not wrap around"};
  }
  return insert({static_cast<std::byte*>(address), bytes}, rights, owner,
                this->exported(address, bytes, owner), bell);
}

Result<MemoryRegion> RegionTable::addOffered(std::span<std::byte> memory, const MemoryOwner& owner,
                                             const ExportedMemory& offer) {
  if (!exports_.load(std::memory_order_acquire))
    return insert(memory, kRemoteRead | kOfDevice, owner, std::nullopt);
  return insert(memory, kRemoteRead | kOfDevice, owner, offer);
}

Result<MemoryRegion> RegionTable::insert(std::span<std::byte> memory, uint32_t rights,
                                         MemoryOwner owner,
                                         const std::optional<ExportedMemory>& exported,
                                         Doorbell* bell) {
  if (exported) rights |= kExported;
  Lock lock(mutex_);
  if (freeEntries_.empty()) {
    const size_t made = made_.load(std::memory_order_relaxed);
    if (made == kCapacity) {
      return Error{ErrorCode::kExhausted, "all " + std::to_string(kCapacity) +
                                              " regions of this engine are in use: let go of some"};
    }
    blocks_[made / kBlockEntries].store(new Block, std::memory_order_release);
    made_.store(made + kBlockEntries, std::memory_order_release);
    freeEntries_.reserve(made + kBlockEntries);
    // They are taken from the end, so low entries come first.
    for (size_t i = kBlockEntries; i > 0; --i)
      freeEntries_.push_back(static_cast<uint32_t>(made + i - 1));
  }
  const size_t index = freeEntries_.back();
  freeEntries_.pop_back();
  Entry& entry = this->entry(index);
  const uint64_t generation = generationOf(entry.word.load(std::memory_order_relaxed)) + 1;
  entry.address = memory.data();
  entry.bytes = memory.size();
  entry.rights = rights;
  entry.owner = owner;
  entry.bell = bell;
  if (exported) exports_.load(std::memory_order_relaxed)->write(index, *exported);
  // The fields are written before the word, so a caller of open() sees them.
  entry.word.store(generation << 32, std::memory_order_release);
  mirrorBell(index);
  mirror(index, generation << 32 | rights);
  lock.unlock();
  const uint64_t key = generation << 32 | (index + 1);
  if ((rights & kLasting) != 0) {
    SharedLock watching(watchersMutex_);
    for (RegionWatcher* watcher : watchers_) watcher->onAdded(key, memory, rights);
  }
  return MemoryRegion(
      this,
      {.address = reinterpret_cast<uintptr_t>(memory.data()), .bytes = memory.size(), .key = key});
}

RegionTable::Use RegionTable::open(uint64_t key, uint64_t offset, uint64_t bytes, uint32_t right) {
  const auto refuse = [this] {
    refusals_.fetch_add(1, std::memory_order_relaxed);
    return Use();
  };
  const uint64_t index = indexOf(key);
  if (index >= made_.load(std::memory_order_acquire)) return refuse();
  Entry& entry = this->entry(index);
  uint64_t word = entry.word.load(std::memory_order_relaxed);
  do {
    if (generationOf(word) != generationOf(key) || (word & kClosed) || (word & kUsers) == kUsers) {
      return refuse();
    }
  } while (!entry.word.compare_exchange_weak(word, word + 1, std::memory_order_acquire,
                                             std::memory_order_relaxed));
  // Counted as a user now, so the fields do not change.
  Use use;
  use.table_ = this;
  use.entry_ = index;
  if (offset > entry.bytes || bytes > entry.bytes - offset || (entry.rights & right) != right) {
    return refuse();
  }
  use.bell_ = entry.bell ? entry.bell : reinterpret_cast<Doorbell*>(entry.address);
  use.data_ = entry.address + offset;
  use.isOfProgram_ = (entry.rights & kOfProgram) != 0;
  use.owner_ = entry.owner;
  return use;
}

void RegionTable::revoke(uint64_t key) {
  const size_t index = indexOf(key);
  Entry& entry = this->entry(index);
  {
    Lock lock(mutex_);
    entry.word.fetch_or(kClosed, std::memory_order_seq_cst);
    mirror(index, 0);
  }
  const Interrupt never;
  const auto unused = [&] { return (entry.word.load(std::memory_order_acquire) & kUsers) == 0; };
  const auto wait = [&] {
    const Waiter waiter{unused_, never, 0, Deadline::after(std::chrono::seconds(10)), SpinPolicy{}};
    return waiter.until(unused);
  };
  while (wait() == WaitResult::kTimeout) {
    // Returning now would free memory that a transfer still reads or writes.
    log(LogLevel::kWarning, "regions", "memory at ", static_cast<void*>(entry.address),
        " is still in transfer to a peer; close its channel to end that");
  }
  if ((entry.rights & kLasting) != 0) {
    SharedLock watching(watchersMutex_);
    for (RegionWatcher* watcher : watchers_) watcher->onRevoked(key);
  }
  if (generationOf(key) == kLastGeneration) return;
  Lock lock(mutex_);
  freeEntries_.push_back(static_cast<uint32_t>(index));
}

void RegionTable::watch(RegionWatcher& watcher) {
  Guard lock(watchersMutex_);
  watchers_.push_back(&watcher);
}

void RegionTable::unwatch(RegionWatcher& watcher) {
  Guard lock(watchersMutex_);
  std::erase(watchers_, &watcher);
}

void RegionTable::release(size_t entry) {
  // Sequentially consistent: pairs with the doorbell's order.
  const uint64_t before = this->entry(entry).word.fetch_sub(1, std::memory_order_seq_cst);
  if (before & kClosed) unused_.ring();
}

Result<uint64_t> RegionTable::mirrorIn(Arena& arena) {
  Lock lock(mutex_);
  if (mirror_) return mirror_.offset();
  auto block = arena.allocate(sizeof(RegionMirror));  // zeros
  if (!block.ok()) return block.error();
  mirror_ = std::move(*block);
  arena_ = arena.base();
  for (size_t i = 0; i < made_.load(std::memory_order_relaxed); ++i) {
    const uint64_t word = entry(i).word.load(std::memory_order_relaxed);
    if (word & kClosed) continue;
    mirrorBell(i);
    mirror(i, generationOf(word) << 32 | entry(i).rights);
  }
  return mirror_.offset();
}

Result<uint64_t> RegionTable::exportIn(Arena& arena, bool all) {
  Lock lock(mutex_);
  if (all) exportsAll_ = true;
  if (exported_) return exported_.offset();
  auto block = arena.allocate(sizeof(DeviceExports));  // zeros
  if (!block.ok()) return block.error();
  exported_ = std::move(*block);
  exports_.store(reinterpret_cast<DeviceExports*>(exported_.data()), std::memory_order_release);
  return exported_.offset();
}

// Without the lock: a driver is asked.
std::optional<ExportedMemory> RegionTable::exported(void* address, size_t bytes,
                                                    const MemoryOwner& owner) {
  if (!owner || !exportsAll_ || !exports_.load(std::memory_order_acquire)) return std::nullopt;
  auto memory = owner.accelerator->exportMemory(address);
  if (memory.ok() && memory->bytes >= bytes &&
      memory->handle.size() <= DeviceExports::kMostHandleBytes)
    return std::move(*memory);
  log(LogLevel::kWarning, "regions", "memory of device ", owner.device,
      " is not mapped by peers, and goes through pinned buffers: ",
      memory.ok() ? "it is of more than one allocation" : memory.error().message);
  return std::nullopt;
}

// An exchange, so that the owner's later accesses to the memory come after it.
void RegionTable::mirror(size_t entry, uint64_t word) {
  if (!mirror_) return;
  auto* mirror = reinterpret_cast<RegionMirror*>(mirror_.data());
  mirror->words_[entry].exchange(word, std::memory_order_seq_cst);
}

// Before the entry's word, whose exchange publishes it.
void RegionTable::mirrorBell(size_t entry) {
  if (!mirror_) return;
  const auto* bell = reinterpret_cast<const std::byte*>(this->entry(entry).bell);
  auto* mirror = reinterpret_cast<RegionMirror*>(mirror_.data());
  mirror->bells_[entry].store(bell ? uint64_t(bell - arena_) : 0, std::memory_order_relaxed);
}

bool RegionMirror::allows(uint64_t key, uint32_t right) const {
  const uint64_t index = indexOf(key);
  if (index >= words_.size() || generationOf(key) == 0) return false;
  // The fence keeps the caller's earlier reads of the region before this check: after a copy, this
  // is its second check. The acquire load keeps its later reads after the check.
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t word = words_[index].load(std::memory_order_acquire);
  return generationOf(word) == generationOf(key) && (word & right) == right;
}

uint64_t RegionMirror::bellOf(uint64_t key) const {
  const uint64_t index = indexOf(key);
  return index < bells_.size() ? bells_[index].load(std::memory_order_relaxed) : 0;
}

std::optional<size_t> RegionMirror::exportOf(uint64_t key) const {
  if (!allows(key, kExported)) return std::nullopt;
  return indexOf(key);
}

RegionTable::Use::Use(Use&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)),
      entry_(other.entry_),
      data_(other.data_),
      bell_(other.bell_),
      isOfProgram_(other.isOfProgram_),
      owner_(other.owner_) {}

RegionTable::Use& RegionTable::Use::operator=(Use&& other) noexcept {
  if (this == &other) return *this;
  if (table_) table_->release(entry_);
  table_ = std::exchange(other.table_, nullptr);
  entry_ = other.entry_;
  data_ = other.data_;
  bell_ = other.bell_;
  isOfProgram_ = other.isOfProgram_;
  owner_ = other.owner_;
  return *this;
}

RegionTable::Use::~Use() {
  if (table_) table_->release(entry_);
}

}  // namespace mooncake
