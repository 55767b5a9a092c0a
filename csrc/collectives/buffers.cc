#include "collectives/buffers.h"

#include <cstring>

#include "base/hash.h"

namespace mooncake {

Call callOf(Call call, Buffers buffers) {
  call.count = 0;
  call.dtype = buffers.front().dtype;
  for (const Buffer& buffer : buffers) call.count += buffer.data.size() / dtypeSize(buffer.dtype);
  if (buffers.size() == 1 && buffers.front().lengths == 0) return call;
  call.tensors = uint32_t(buffers.size());
  for (const Buffer& buffer : buffers) {
    call.lengths =
        fnv1a({buffer.data.size(), uint64_t(buffer.dtype), buffer.lengths}, call.lengths);
  }
  return call;
}

Call callForParts(Call call, const Group& group, size_t parts) {
  if (parts == size_t(group.size())) return call;
  call.root = int32_t(parts);
  call.isBeyond = size_t(group.rank()) >= parts;
  return call;
}

Call callWithRoot(Verb verb, const Buffer& part, int root, const Group& group, size_t parts) {
  Call call{.verb = verb,
            .dtype = part.dtype,
            .root = root,
            .count = part.data.size() / dtypeSize(part.dtype)};
  if (parts == 0 || parts == size_t(group.size())) return call;
  call.tensors = uint32_t(parts);
  call.isBeyond = size_t(group.rank()) >= parts;
  return call;
}

size_t packedBytes(Buffers buffers) {
  size_t bytes = 0;
  for (const Buffer& buffer : buffers) bytes = aligned(bytes) + buffer.data.size();
  return bytes;
}

void pack(Buffers buffers, std::byte* payload) {
  for (const Buffer& buffer : buffers) {
    if (!buffer.data.empty()) std::memcpy(payload, buffer.data.data(), buffer.data.size());
    payload += aligned(buffer.data.size());
  }
}

void packForPeers(const Operation& op, Buffers buffers) {
  std::byte* payload = op.payload();
  for (const Buffer& buffer : buffers) {
    op.write(payload, buffer.data);
    payload += aligned(buffer.data.size());
  }
}

Result<size_t> announceBuffers(Operation& op, Buffers buffers, std::vector<MemoryRegion>& regions) {
  regions.clear();
  op.announceInput({});
  for (const Buffer& buffer : buffers) {
    auto region =
        op.group().engine().regions().add(buffer.data.data(), buffer.data.size(), kRemoteRead);
    if (!region.ok()) return region.error();
    regions.push_back(std::move(*region));
  }
  if (regions.size() == 1) {
    op.announceInput(regions.front().remote());
    return size_t(0);
  }
  std::byte* cursor = op.payload();
  for (const MemoryRegion& region : regions) {
    const RemoteRegion remote = region.remote();
    std::memcpy(cursor, &remote, sizeof(remote));
    cursor += sizeof(remote);
  }
  return size_t(cursor - op.payload());
}

Result<RemoteRegion> announcedBuffer(const Operation& op, int rank, size_t index, size_t count) {
  if (count == 1) return op.slot(rank).input;
  auto table = op.payloadOf(rank, count * sizeof(RemoteRegion));
  if (!table.ok()) return table.error();
  RemoteRegion region;
  std::memcpy(&region, *table + index * sizeof(region), sizeof(region));
  return region;
}

size_t mostBuffers(const Group& group) { return group.slotBytes() / sizeof(RemoteRegion); }

Status checkTableOf(const Group& group, size_t count) {
  if (count <= mostBuffers(group)) return {};
  return {ErrorCode::kUnsupported, std::to_string(count) +
                                       " large tensors in one call; the most is " +
                                       std::to_string(mostBuffers(group))};
}

}  // namespace mooncake
