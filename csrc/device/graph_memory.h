#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Pinned memory for the operations that a group's graphs have. One operation after the other uses
// it, so all have the same memory. It is never freed, because replays may come at any time. One
// thread at a time.
class GraphMemory {
 public:
  // `limit`: bytes that it allocates at most.
  GraphMemory(Accelerator& accelerator, size_t limit) : accelerator_(accelerator), limit_(limit) {}

  // How much of the memory one operation has taken.
  struct Taken {
    size_t block = 0;
    size_t bytes = 0;
  };
  // kExhausted: the limit is reached. Pieces that were taken with one `taken` do not overlap.
  Result<std::span<std::byte>> take(size_t bytes, Taken& taken);

 private:
  Result<std::span<std::byte>> grow(size_t bytes);

  Accelerator& accelerator_;
  const size_t limit_;
  size_t allocated_ = 0;
  std::vector<std::span<std::byte>> blocks_;  // each larger than the one before it
};

}  // namespace mooncake
