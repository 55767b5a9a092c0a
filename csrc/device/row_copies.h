#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// The used rows of a tensor [blocks, rows, ...] on a device or in pinned memory.
struct RowCopy {
  void* to;
  const void* from;
  const int32_t* counts;  // in pinned memory: the used rows of each `blocksEach` blocks
  uint32_t blocks;
  uint32_t blocksEach;
  uint32_t rows;
  size_t rowBytes;
};

// Loads the kernel of copyRows(). kUnsupported: this build has none for the device.
Status prepareRowCopies(Accelerator& accelerator, int device);
// Enqueues a kernel that copies the rows. It reads the counts when the stream has come to it, so the
// host may not know them yet.
Status copyRows(Accelerator& accelerator, DeviceStream stream, const RowCopy& copy);

}  // namespace mooncake
