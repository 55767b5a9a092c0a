#include "engine/memory/retired_memory.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace mooncake {

void RetiredBlocks::retire(std::vector<RetiredMemory> memory, std::function<bool()> isFree) {
  {
    Lock lock(mutex_);
    retired_.push_back({std::move(memory), std::move(isFree)});
  }
  free();
}

Result<ArenaBlock> RetiredBlocks::allocate(Arena& arena, size_t bytes, Deadline deadline) {
  constexpr auto kLook = std::chrono::milliseconds(1);
  for (;;) {
    const bool isMoreRetired = free();
    auto block = arena.allocate(bytes);
    if (block.ok() || !isMoreRetired || deadline.passed()) return block;
    std::this_thread::sleep_for(kLook);
  }
}

bool RetiredBlocks::free() {
  Lock lock(mutex_);
  std::erase_if(retired_, [](const Retired& retired) { return retired.isFree(); });
  return std::ranges::any_of(retired_, [](const Retired& one) { return !one.memory.empty(); });
}

void RetiredBlocks::abandon() {
  Lock lock(mutex_);
  for (Retired& retired : retired_) {
    for (RetiredMemory& memory : retired.memory) memory.region.abandon();
  }
}

}  // namespace mooncake
