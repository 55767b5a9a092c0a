#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// Reads a peer's memory outside its arena on the calling thread, with one copy and without the
// peer's help.
class DirectReader {
 public:
  virtual ~DirectReader() = default;

  // The range lies inside region.bytes. kUnsupported: this read does not work directly, so ask the
  // peer for it. All other errors are final.
  virtual ErrorCode read(const RemoteRegion& region, uint64_t offset,
                         std::span<std::byte> target) = 0;
};

}  // namespace mooncake
