#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine/memory/arena.h"
#include "engine/peer.h"
#include "transfer/registered_memory.h"

namespace mooncake::transfer {

// Memory that the engine gives away: a part of its arena, so peers of the host map it. One
// registration for all of it, and pages only where it is touched. What is larger than the largest
// class is memory of its own.
class ManagedPool {
 public:
  static constexpr size_t kLeastBytes = size_t(8) << 10;
  static constexpr size_t kMostBytes = size_t(256) << 20;
  static constexpr size_t kPoolBytes = size_t(2) << 30;

  // `lateWriters`: Engine::lateWriters(). What is let go of while there are some is not given away
  // again before all of these have come to the end of their writes.
  using Peers = std::vector<std::shared_ptr<Peer>>;
  ManagedPool(RegisteredMemory& memory, std::function<Peers()> lateWriters)
      : memory_(memory), lateWriters_(std::move(lateWriters)) {}
  ~ManagedPool();

  // Takes and registers its part of the arena.
  Code open(Arena& arena, std::string& why);
  // 0: `why` says why not.
  uint64_t allocate(uint64_t bytes, std::string& why);
  Code free(uint64_t address, uint64_t bytes, std::string& why);

 private:
  static constexpr size_t kClasses = 16;  // 8 KiB, 16 KiB ... 256 MiB
  void giveBack(uint64_t offset, size_t aClass);
  void giveBackKept();
  uint64_t allocateLarge(uint64_t bytes, std::string& why);
  Code freeLarge(uint64_t address, uint64_t bytes, std::string& why);

  struct Kept {
    uint64_t offset;
    size_t aClass;
    Peers writers;
  };

  RegisteredMemory& memory_;
  const std::function<Peers()> lateWriters_;
  ArenaBlock block_;
  std::mutex mutex_;                               // guards all below
  std::array<std::set<uint64_t>, kClasses> free_;  // offsets in the block, by class
  std::map<uint64_t, size_t> used_;                // offset -> class
  std::vector<Kept> kept_;                         // let go of, and not to be given away yet
  std::map<uint64_t, uint64_t> large_;             // address -> bytes
};

}  // namespace mooncake::transfer
