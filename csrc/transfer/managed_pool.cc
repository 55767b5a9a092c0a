#include "transfer/managed_pool.h"

#include <algorithm>
#include <cerrno>
#include <sys/mman.h>
#include <utility>

namespace mooncake::transfer {
namespace {

// The smallest class that holds `bytes`.
size_t classOf(uint64_t bytes) {
  size_t wanted = 0;
  while ((ManagedPool::kLeastBytes << wanted) < bytes) ++wanted;
  return wanted;
}
uint64_t bytesOf(size_t aClass) { return uint64_t(ManagedPool::kLeastBytes) << aClass; }
uint64_t wholePages(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

ManagedPool::~ManagedPool() {
  std::string why;
  if (block_) (void)memory_.remove(reinterpret_cast<uint64_t>(block_.data()), why);
  while (!large_.empty()) {
    const auto [address, bytes] = *large_.begin();
    if (freeLarge(address, bytes, why) != kGood) large_.erase(address);
  }
}

Code ManagedPool::open(Arena& arena, std::string& why) {
  auto block = arena.allocate(kPoolBytes);
  if (!block.ok()) {
    why = block.error().message;
    return kMemory;
  }
  block_ = std::move(*block);
  {
    Lock lock(mutex_);
    for (uint64_t offset = 0; offset < kPoolBytes; offset += kMostBytes)
      free_[kClasses - 1].insert(offset);
  }
  return memory_.add(reinterpret_cast<uint64_t>(block_.data()), kPoolBytes,
                     {.location = "cpu:0", .isOurs = true}, why);
}

uint64_t ManagedPool::allocate(uint64_t bytes, std::string& why) {
  if (bytes == 0) {
    why = "a buffer of 0 bytes";
    return 0;
  }
  if (bytes > kMostBytes) return allocateLarge(bytes, why);
  const size_t wanted = classOf(bytes);
  Lock lock(mutex_);
  giveBackKept();
  size_t from = wanted;
  while (from < kClasses && free_[from].empty()) ++from;
  if (from == kClasses) {
    why = "no " + std::to_string(bytesOf(wanted)) + " bytes in one piece are left of the pool of " +
          std::to_string(kPoolBytes >> 20) + " MiB";
    return 0;
  }
  const uint64_t offset = *free_[from].begin();
  free_[from].erase(free_[from].begin());
  while (from > wanted) {
    --from;
    free_[from].insert(offset + bytesOf(from));  // the upper half
  }
  used_[offset] = wanted;
  return reinterpret_cast<uint64_t>(block_.data()) + offset;
}

Code ManagedPool::free(uint64_t address, uint64_t bytes, std::string& why) {
  const uint64_t start = reinterpret_cast<uint64_t>(block_.data());
  if (address < start || address >= start + kPoolBytes) return freeLarge(address, bytes, why);
  Lock lock(mutex_);
  const uint64_t offset = address - start;
  const auto found = used_.find(offset);
  if (found == used_.end() || bytes > bytesOf(found->second)) {
    why = "no managed buffer of so many bytes begins there";
    return kInvalid;
  }
  const size_t aClass = found->second;
  used_.erase(found);
  // No new write to the buffer can begin. Writes under way now began before this list was taken.
  if (auto writers = lateWriters_(); !writers.empty()) {
    kept_.push_back({offset, aClass, std::move(writers)});
  } else {
    giveBack(offset, aClass);
  }
  return kGood;
}

void ManagedPool::giveBackKept() {
  std::erase_if(kept_, [this](const Kept& kept) REQUIRES(mutex_) {
    if (std::ranges::any_of(kept.writers, [](const auto& peer) { return peer->hasLateWrites(); }))
      return false;
    giveBack(kept.offset, kept.aClass);
    return true;
  });
}

// Frees a piece, and merges it with its other half as long as that is free, too.
void ManagedPool::giveBack(uint64_t offset, size_t aClass) {
  for (; aClass + 1 < kClasses; ++aClass) {
    const uint64_t other = offset ^ bytesOf(aClass);
    if (free_[aClass].erase(other) == 0) break;
    offset = std::min(offset, other);
  }
  free_[aClass].insert(offset);
}

uint64_t ManagedPool::allocateLarge(uint64_t bytes, std::string& why) {
  if (bytes > (uint64_t(1) << 47)) {
    why = "there is not so much memory";
    return 0;
  }
  void* memory = ::mmap(nullptr, wholePages(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    why = systemError("mmap", errno).message;
    return 0;
  }
  const auto address = reinterpret_cast<uint64_t>(memory);
  if (memory_.add(address, bytes, {.location = "cpu:0", .isOurs = true}, why) != kGood) {
    ::munmap(memory, wholePages(bytes));
    return 0;
  }
  Lock lock(mutex_);
  large_[address] = bytes;
  return address;
}

Code ManagedPool::freeLarge(uint64_t address, uint64_t bytes, std::string& why) {
  uint64_t whole;
  {
    Lock lock(mutex_);
    const auto found = large_.find(address);
    if (found == large_.end() || bytes > found->second) {
      why = "no managed buffer of so many bytes begins there";
      return kInvalid;
    }
    whole = found->second;
    large_.erase(found);
  }
  const Code code = memory_.remove(address, why);
  if (code == kGood) {
    ::munmap(reinterpret_cast<void*>(address), wholePages(whole));
  } else {
    Lock lock(mutex_);
    large_[address] = whole;
  }
  return code;
}

}  // namespace mooncake::transfer
