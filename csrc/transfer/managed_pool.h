#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/memory/arena.h"
#include "engine/peers/peer.h"
#include "transfer/registered_memory.h"

namespace mooncake::transfer {

// Allocator of the engine's managed buffers. Its memory is part of the arena, so peers on this host
// map it. The pool is one registration; its pages exist only once they are touched. A buffer larger
// than the largest class (256 MiB) gets its own mapping.
class ManagedPool {
 public:
  static constexpr size_t kLeastBytes = size_t(8) << 10;
  static constexpr size_t kMostBytes = size_t(256) << 20;
  static constexpr size_t kPoolBytes = size_t(2) << 30;

  // `lateWriters`: Engine::lateWriters(). If there are late writers when a buffer is freed, the
  // pool keeps the buffer until the writes of all of them have ended.
  using Peers = std::vector<std::shared_ptr<Peer>>;
  ManagedPool(RegisteredMemory& memory, std::function<Peers()> lateWriters)
      : memory_(memory), lateWriters_(std::move(lateWriters)) {}
  ~ManagedPool();

  // Allocates the pool from the arena and registers it.
  Code open(Arena& arena, std::string& why);
  // Returns 0 and sets `why` on failure.
  uint64_t allocate(uint64_t bytes, std::string& why);
  Code free(uint64_t address, uint64_t bytes, std::string& why);

 private:
  static constexpr size_t kClasses = 16;  // 8 KiB, 16 KiB ... 256 MiB
  void giveBack(uint64_t offset, size_t aClass) REQUIRES(mutex_);
  void giveBackKept() REQUIRES(mutex_);
  uint64_t allocateLarge(uint64_t bytes, std::string& why) EXCLUDES(mutex_);
  Code freeLarge(uint64_t address, uint64_t bytes, std::string& why) EXCLUDES(mutex_);

  struct Kept {
    uint64_t offset;
    size_t aClass;
    Peers writers;
  };

  RegisteredMemory& memory_;
  const std::function<Peers()> lateWriters_;
  ArenaBlock block_;
  Mutex mutex_;
  // Offsets in the block, by class.
  std::array<std::set<uint64_t>, kClasses> free_ GUARDED_BY(mutex_);
  std::map<uint64_t, size_t> used_ GUARDED_BY(mutex_);  // offset -> class
  std::vector<Kept> kept_ GUARDED_BY(mutex_);  // freed, but late writers may still write there
  std::map<uint64_t, uint64_t> large_ GUARDED_BY(mutex_);  // address -> bytes
};

}  // namespace mooncake::transfer
