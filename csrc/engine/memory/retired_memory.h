#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/result.h"
#include "engine/memory/arena.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// Memory that peers may still touch after its owner is done with it.
struct RetiredMemory {
  std::shared_ptr<const void> keeps;  // ends after the region: peers may ring a bell there
  ArenaBlock block;
  MemoryRegion region;  // ends before the block
};

// Keeps retired memory of an arena until no peer touches it, and gives out memory of the arena.
// Thread-safe.
class RetiredBlocks {
 public:
  // See Engine.
  void retire(std::vector<RetiredMemory> memory, std::function<bool()> isFree);
  Result<ArenaBlock> allocate(Arena& arena, size_t bytes, Deadline deadline);
  // Frees all memory that no peer touches any more. Returns whether more is left.
  bool free();
  // The engine ends: no region is revoked any more.
  void abandon();

 private:
  struct Retired {
    std::vector<RetiredMemory> memory;
    std::function<bool()> isFree;
  };
  Mutex mutex_;
  std::vector<Retired> retired_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
