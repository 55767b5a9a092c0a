#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collectives/collectives.h"
#include "group/operation.h"

// Several buffers in one operation: torch's coalesced calls, and lists of one tensor per rank.
// Small buffers are packed into the slot's payload. Large ones are registered one by one, and the
// payload is a table of their regions. The region of a single buffer stands in the slot's header.
namespace mooncake {

// Returns the call of all buffers as one operation. `buffers` have the same lengths on every rank.
Call callOf(Call call, Buffers buffers);

// Makes a buffer that is only read, also by peers. The table of regions takes no const addresses.
inline Buffer readOnly(ConstSpan data, DType dtype) {
  return {{const_cast<std::byte*>(data.data()), data.size()}, dtype};
}

// Says in the call that its buffers have parts for the first `parts` ranks only, if not for all.
Call callForParts(Call call, const Group& group, size_t parts);
// The call of a gather or a scatter of parts of this length. `parts`: as in gather().
Call callWithRoot(Verb verb, const Buffer& part, int root, const Group& group, size_t parts);

// Offset in a payload of the buffer that follows one of this length. Aligned for every type.
constexpr size_t aligned(size_t bytes) { return (bytes + 15) & ~size_t(15); }
size_t packedBytes(Buffers buffers);
// Copies the buffers into the payload. packForPeers() is for payloads of which peers read most.
void pack(Buffers buffers, std::byte* payload);
void packForPeers(const Operation& op, Buffers buffers);

// Registers the buffers for peers to read and announces them. Returns the length of the payload.
Result<size_t> announceBuffers(Operation& op, Buffers buffers, std::vector<MemoryRegion>& regions);
// The region of buffer `index` of the `count` that the rank announced. Valid once it has begun.
Result<RemoteRegion> announcedBuffer(const Operation& op, int rank, size_t index, size_t count);
// Number of regions for which a payload has room.
size_t mostBuffers(const Group& group);
// kUnsupported: `count` is larger than that. Called before the operation, on all ranks.
Status checkTableOf(const Group& group, size_t count);

}  // namespace mooncake
