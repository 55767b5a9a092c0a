#include "base/block_cache.h"

#include <cstdint>
#include <sys/mman.h>

namespace mooncake {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;

size_t roundedUp(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

BlockCache::~BlockCache() {
  for (const Block& block : idle_) unmap(block);
}

std::shared_ptr<std::byte> BlockCache::take(size_t bytes) {
  Block block{nullptr, 0};
  {
    Lock lock(mutex_);
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const bool fits = it->bytes >= bytes && it->bytes / 2 <= roundedUp(bytes);
      if (fits && (best == idle_.end() || it->bytes < best->bytes)) best = it;
    }
    if (best != idle_.end()) {
      block = *best;
      idleBytes_ -= block.bytes;
      idle_.erase(best);
    }
  }
  // With room for a result that is a little larger: pages that nobody touches cost nothing.
  if (!block.data) block = map(roundedUp(bytes + bytes / 8));
  if (!block.data) return nullptr;
  return {block.data, [self = shared_from_this(), block](std::byte*) { self->giveBack(block); }};
}

size_t BlockCache::idleBytes() const {
  Lock lock(mutex_);
  return idleBytes_;
}

void BlockCache::giveBack(Block block) {
  std::list<Block> freed;
  {
    Lock lock(mutex_);
    idle_.push_back(block);
    idleBytes_ += block.bytes;
    freed = takeSurplus();
  }
  for (const Block& one : freed) unmap(one);
}

void BlockCache::close() {
  std::list<Block> freed;
  {
    Lock lock(mutex_);
    mostIdle_ = 0;
    freed = takeSurplus();
  }
  for (const Block& one : freed) unmap(one);
}

std::list<BlockCache::Block> BlockCache::takeSurplus() {
  std::list<Block> surplus;
  while (idleBytes_ > mostIdle_) {
    idleBytes_ -= idle_.front().bytes;
    surplus.splice(surplus.end(), idle_, idle_.begin());
  }
  return surplus;
}

// In huge pages, where the kernel has some to give: fresh memory is mapped faster.
BlockCache::Block BlockCache::map(size_t bytes) {
  void* const all = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return {nullptr, 0};
  const auto begin = reinterpret_cast<uintptr_t>(all), data = roundedUp(begin);
  if (data > begin) ::munmap(all, data - begin);
  const auto end = data + bytes;
  if (begin + kHugePage > data) ::munmap(reinterpret_cast<void*>(end), begin + kHugePage - data);
  ::madvise(reinterpret_cast<void*>(data), bytes, MADV_HUGEPAGE);
  return {reinterpret_cast<std::byte*>(data), bytes};
}

void BlockCache::unmap(const Block& block) { ::munmap(block.data, block.bytes); }

}  // namespace mooncake
