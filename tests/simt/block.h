#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/simt/builtins.h"
#include "tests/simt/fiber.h"

namespace mooncake::simt {

struct Block;

// A kernel that a test has launched.
struct Launch {
  int rank = 0;
  int stream = 0;
  std::string name;
  dim3 grid, block;
  size_t sharedBytes = 0;
  std::function<void()> body;

  const Launch* before = nullptr;  // the last one on its stream
  char order = 0;                  // orders this launch's work before the next one's
  unsigned blocksStarted = 0;
  unsigned blocksEnded = 0;
  unsigned blocks() const { return grid.x * grid.y * grid.z; }
  unsigned threads() const { return block.x * block.y * block.z; }
};

enum class ThreadState : uint8_t { kRunnable, kSpinning, kAtBarrier, kAtWarpCall, kEnded };

// A CUDA thread.
struct Thread {
  Block* block = nullptr;
  unsigned index = 0;  // in the block
  ThreadState state = ThreadState::kRunnable;
  size_t listed = 0;  // its place in the scheduler's list
  Where where;        // its last call
  // Memory of an access that has been counted, and that the compiler may report in pieces.
  const std::byte* counted = nullptr;
  size_t countedBytes = 0;
  void setCounted(const void* address, size_t bytes) {
    counted = static_cast<const std::byte*>(address);
    countedBytes = bytes;
  }
  bool isCounted(const void* address) const {
    const auto* const byte = static_cast<const std::byte*>(address);
    return byte >= counted && byte < counted + countedBytes;
  }
  std::unique_ptr<Fiber> fiber;
  char last = 0;  // orders the thread's work before the end of the run, if the rank is killed
};

// A call that lanes of a warp make together.
struct Meeting {
  bool isOpen = false;
  WarpCall call = WarpCall::kSync;
  unsigned mask = 0;
  unsigned arrived = 0;
  unsigned left = 0;
  Where where;
  LaneValues values;
};

struct Warp {
  // Two masks that do not overlap may meet at once, and lanes that are slow to leave may still be
  // in their last call.
  static constexpr int kMeetings = 64;
  Meeting meetings[kMeetings];
  // The words by which __syncwarp orders memory, by the mask's first lane. They alternate: a lane
  // that is slow to leave must not get the order of the next call.
  unsigned turn[32] = {};
  char order[2][32] = {};
};

// A block that runs: its threads, warps and shared memory.
struct Block {
  Block(Launch& launch, unsigned number);
  ~Block();

  Launch& launch;
  uint3 index{};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned alive = 0;      // threads that have not ended
  unsigned atBarrier = 0;  // threads that wait in __syncthreads
  unsigned turn = 0;       // of the barrier; see Warp::turn
  char barrier[2] = {};
  bool votes[2] = {true, true};  // all threads of the turn have voted so

  void* staticShared(const void* key, size_t bytes, size_t alignment);
  bool isShared(const void* address) const;
  void* dynamicShared() const { return dynamic_; }
  std::string nameOf(const Thread& thread) const;  // "rank 1 block 0 thread 33"

 private:
  void* allocate(size_t bytes, size_t alignment);

  struct Memory {
    std::byte* data;
    size_t bytes;
  };
  void* dynamic_ = nullptr;
  std::map<const void*, void*> statics_;
  std::vector<Memory> memory_;
};

}  // namespace mooncake::simt
