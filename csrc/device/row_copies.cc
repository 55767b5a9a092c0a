#include "device/row_copies.h"

#include <algorithm>

#include "device/kernel_launch.h"
#include "kernels/copy_rows.h"
#include "kernels/kernel_id.h"

namespace mooncake {

Status prepareRowCopies(Accelerator& accelerator, int device) {
  return accelerator.prepareKernels(device);
}

// 16 blocks have as many loads on their way as a link to the host's memory needs.
Status copyRows(Accelerator& accelerator, DeviceStream stream, const RowCopy& copy) {
  constexpr size_t kBytesEach = 64 << 10, kMostBlocks = 16;
  const size_t bytes = size_t(copy.blocks) * copy.rows * copy.rowBytes;
  if (bytes == 0) return {};
  const kernels::CopyRowsArguments arguments{.to = static_cast<unsigned char*>(copy.to),
                                             .from = static_cast<const unsigned char*>(copy.from),
                                             .counts = copy.counts,
                                             .blocks = copy.blocks,
                                             .blocksEach = copy.blocksEach,
                                             .rows = copy.rows,
                                             .rowBytes = copy.rowBytes};
  KernelLaunch launch{.kernel = KernelId::kCopyRows, .block = kernels::kCountsAtOnce};
  launch.grid = uint32_t(std::clamp(bytes / kBytesEach, size_t{1}, kMostBlocks));
  if (launch.grid > 1) launch.block = 512;
  launch.arguments = bytesOf(arguments);
  return accelerator.launch(stream, launch);
}

}  // namespace mooncake
