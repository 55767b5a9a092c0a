// Small (all that a rank sends fits its slot): one exchange of slots. Large: the slot announces one
// region per receiver and every rank fetches its part from each, starting with its right neighbour;
// (n-1)s bytes in and out of each rank, one copy where the memory can be read. Ranks may differ in
// which of the two they send.
//
// Payload:  sum sent, sum received | sends[n], receives[n] in bytes | for every other rank in order
// the data, or one region each when input.bytes > 0. The sums are hashes over (from, to, bytes):
// over all ranks they are equal exactly when all splits fit pair by pair, so that every rank learns
// of a misfit anywhere at the cost of two numbers.
#include <cstring>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/operation.h"

namespace mooncake {
namespace {

uint64_t mix(uint64_t from, uint64_t to, uint64_t bytes) {
  uint64_t x =
      (from << 32 | to) * 0x9e3779b97f4a7c15 + bytes * 0xbf58476d1ce4e5b9 + 0x94d049bb133111eb;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The payload's fixed part.
struct Splits {
  explicit Splits(int size) : size(size) {}
  size_t bytes() const { return 8 * (2 + 2 * size_t(size)); }
  static uint64_t& word(std::byte* payload, size_t index) {
    return reinterpret_cast<uint64_t*>(payload)[index];
  }
  static uint64_t word(const std::byte* payload, size_t index) {
    return reinterpret_cast<const uint64_t*>(payload)[index];
  }
  uint64_t sends(const std::byte* payload, int to) const { return word(payload, 2 + size_t(to)); }
  uint64_t receives(const std::byte* payload, int from) const {
    return word(payload, 2 + size_t(size + from));
  }
  int size;
};

Status checkSplits(Operation& op, const Splits& splits) {
  uint64_t sent = 0, received = 0;
  for (int r = 0; r < op.size(); ++r) {
    if (op.slot(r).payloadBytes < splits.bytes()) return op.payloadOf(r, splits.bytes()).status();
    sent += splits.word(op.slot(r).payload, 0);
    received += splits.word(op.slot(r).payload, 1);
  }
  if (sent == received) return {};
  std::string misfits;
  for (int from = 0; from < op.size(); ++from) {
    for (int to = 0; to < op.size(); ++to) {
      const uint64_t out = splits.sends(op.slot(from).payload, to),
                     in = splits.receives(op.slot(to).payload, from);
      if (out == in || misfits.size() > 500) continue;
      misfits += (misfits.empty() ? "" : "; ") + op.group().nameRank(from) + " sends " +
                 std::to_string(out) + " bytes to " + op.group().nameRank(to) + ", which expects " +
                 std::to_string(in);
    }
  }
  return op.fail(
      {ErrorCode::kMismatch, "the splits do not fit: " + misfits + ". Nothing was changed"});
}

}  // namespace

Status alltoall(Group& group, std::span<const ConstSpan> inputs, std::span<const Span> outputs,
                DType dtype, Deadline deadline) {
  const int size = group.size(), rank = group.rank();
  const Splits splits(size);
  Operation op(group, {.verb = Verb::kAlltoall, .dtype = dtype}, deadline);
  MOONCAKE_TRY(op.open());

  uint64_t sent = 0, received = 0;
  size_t total = 0;
  for (int r = 0; r < size; ++r) {
    Splits::word(op.payload(), 2 + size_t(r)) = inputs[r].size();
    Splits::word(op.payload(), 2 + size_t(size + r)) = outputs[r].size();
    sent += mix(rank, r, inputs[r].size());
    received += mix(r, rank, outputs[r].size());
    total += inputs[r].size();
  }
  Splits::word(op.payload(), 0) = sent;
  Splits::word(op.payload(), 1) = received;

  std::vector<MemoryRegion> regions;
  std::byte* cursor = op.payload() + splits.bytes();
  // Fetching waits once more, for all to have fetched: where that costs switches between ranks, a
  // copy through the slot is cheaper as long as it fits.
  const bool isSmall = group.isCrowded()
                           ? splits.bytes() + total - inputs[rank].size() <= group.slotBytes()
                           : splits.bytes() + total <= group.eagerBytes();
  if (isSmall) {
    op.announceInput({});
    for (int r = 0; r < size; ++r) {
      if (r == rank || inputs[r].empty()) continue;
      std::memcpy(cursor, inputs[r].data(), inputs[r].size());
      cursor += inputs[r].size();
    }
  } else {
    op.announceInput({.bytes = total});
    for (int r = 0; r < size; ++r) {
      if (r == rank) continue;
      const ConstSpan input = inputs[r];
      // Peers only read; the table knows addresses without const.
      auto region = group.engine().regions().add(const_cast<std::byte*>(input.data()), input.size(),
                                                 kRemoteRead);
      if (!region.ok()) return op.fail(region.error());
      const RemoteRegion remote = region->remote();
      std::memcpy(cursor, &remote, sizeof(remote));
      cursor += sizeof(remote);
      regions.push_back(std::move(*region));
    }
  }
  MOONCAKE_TRY(op.begin(size_t(cursor - op.payload())));
  MOONCAKE_TRY(op.awaitAllBegun());
  MOONCAKE_TRY(checkSplits(op, splits));

  bool anyLarge = false;
  Fetches fetches(op);
  for (int step = 0; step < size; ++step) {
    const int from = (rank + step) % size;
    const Slot& slot = op.slot(from);
    const bool isLarge = slot.input.bytes > 0;
    anyLarge = anyLarge || isLarge;
    if (from == rank) {
      if (!inputs[rank].empty())
        std::memmove(outputs[rank].data(), inputs[rank].data(), inputs[rank].size());
      continue;
    }
    size_t at = splits.bytes();
    for (int to = 0; to < rank; ++to) {
      if (to == from) continue;
      at += isLarge ? sizeof(RemoteRegion) : splits.sends(slot.payload, to);
    }
    const size_t length = isLarge ? sizeof(RemoteRegion) : outputs[from].size();
    if (at > slot.payloadBytes || length > slot.payloadBytes - at)
      return op.payloadOf(from, at + length).status();
    if (isLarge) {
      RemoteRegion region;
      std::memcpy(&region, slot.payload + at, sizeof(region));
      MOONCAKE_TRY(fetches.start(from, region, 0, outputs[from]));
    } else if (length) {
      std::memcpy(outputs[from].data(), slot.payload + at, length);
    }
  }
  MOONCAKE_TRY(fetches.await());
  return anyLarge ? op.finish() : op.commit();
}

}  // namespace mooncake
