#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collectives/collectives.h"
#include "group/operation.h"

// Several buffers in one operation: torch's coalesced calls, and lists of one tensor per
// rank. Small, they stand in the slot's payload one behind the other. Large, they are registered
// one by one, and the payload is a table of their regions; a single one's stands in the slot's
// header.
namespace mooncake {

// The call of all of them as one; `buffers` is what every rank has of the same lengths.
Call callOf(Call call, Buffers buffers);

// A buffer that is only read. (Peers only read either; the table of regions knows addresses without
// const.)
inline Buffer readOnly(ConstSpan data, DType dtype) {
  return {{const_cast<std::byte*>(data.data()), data.size()}, dtype};
}

uint32_t hashOn(uint32_t hash, uint64_t value);  // FNV-1a

// Where the buffer behind one of this length starts in a payload: aligned for every type.
constexpr size_t aligned(size_t bytes) { return (bytes + 15) & ~size_t(15); }
size_t packedBytes(Buffers buffers);
// Into the payload. packForPeers(): most of which peers read.
void pack(Buffers buffers, std::byte* payload);
void packForPeers(const Operation& op, Buffers buffers);

// Registers the buffers for others to read, and announces them. What the payload then holds, in
// bytes.
Result<size_t> announceBuffers(Operation& op, Buffers buffers, std::vector<MemoryRegion>& regions);
// The index-th of the `count` buffers that the rank announced, once it has begun.
Result<RemoteRegion> announcedBuffer(const Operation& op, int rank, size_t index, size_t count);
// As many as a payload has room for the regions of.
size_t mostBuffers(const Group& group);
// kUnsupported: there are more. Before the operation, on all ranks.
Status checkTableOf(const Group& group, size_t count);

}  // namespace mooncake
