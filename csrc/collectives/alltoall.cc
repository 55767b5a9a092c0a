// Small (all that a rank sends fits its slot): one exchange of slots. Large: the slot announces one
// region per receiver and every rank fetches its part from each, starting with its right neighbour;
// (n-1)s bytes in and out of each rank, one copy where the memory can be read. Ranks may differ in
// which of the two they send.
//
// Payload:  sum sent, sum received | sends[n], receives[n] in bytes | for every other rank in order
// the data, or one region each when input.bytes > 0. The sums are hashes over (from, to, bytes):
// over all ranks they are equal exactly when all splits fit pair by pair, so that every rank learns
// of a misfit anywhere at the cost of two numbers.
#include <algorithm>
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

class Alltoall final : public Algorithm {
 public:
  Alltoall(Group& group, std::span<const ConstSpan> inputs, std::span<const Span> outputs)
      : inputs_(inputs), outputs_(outputs), splits_(group.size()) {
    for (int r = 0; r < group.size(); ++r) total_ += inputs_[r].size();
    const size_t own = inputs_[group.rank()].size();
    // Fetching waits once more, for all to have fetched: where that costs switches between ranks, a
    // copy through the slot is cheaper as long as it fits.
    isSmall_ = group.isCrowded() ? splits_.bytes() + total_ - own <= group.slotBytes()
                                 : splits_.bytes() + total_ <= group.eagerBytes();
  }

  Status contribute(Operation& op) override {
    writeSplits(op);
    std::byte* cursor = op.payload() + splits_.bytes();
    op.announceInput({.bytes = isSmall_ ? 0 : total_});
    for (int r = 0; r < op.size(); ++r) {
      if (r == op.rank()) continue;
      const ConstSpan input = inputs_[r];
      if (isSmall_) {
        if (!input.empty()) std::memcpy(cursor, input.data(), input.size());
        cursor += input.size();
        continue;
      }
      // Peers only read; the table knows addresses without const.
      auto region = op.group().engine().regions().add(const_cast<std::byte*>(input.data()),
                                                      input.size(), kRemoteRead);
      if (!region.ok()) return region.error();
      const RemoteRegion remote = region->remote();
      std::memcpy(cursor, &remote, sizeof(remote));
      cursor += sizeof(remote);
      regions_.push_back(std::move(*region));
    }
    MOONCAKE_TRY(op.begin(size_t(cursor - op.payload())));
    MOONCAKE_TRY(op.awaitAllBegun());
    isAnyLarge_ = std::ranges::any_of(op.ranks(), [&](int r) { return isLarge(op, r); });
    if (!isAnyLarge_) return {};
    MOONCAKE_TRY(checkSplits(op));
    return take(op);
  }

  Status conclude(Operation& op) override {
    if (isAnyLarge_) return op.commitDone();
    MOONCAKE_TRY(op.awaitAllBegun());
    MOONCAKE_TRY(checkSplits(op));
    MOONCAKE_TRY(take(op));
    return op.commit(Operation::When::kAllBegan);
  }

  void rollBack(Operation&, Then) override {
    regions_.clear();
    isAnyLarge_ = false;
  }

 private:
  static bool isLarge(Operation& op, int rank) { return op.slot(rank).input.bytes > 0; }

  void writeSplits(Operation& op) const {
    uint64_t sent = 0, received = 0;
    for (int r = 0; r < op.size(); ++r) {
      Splits::word(op.payload(), 2 + size_t(r)) = inputs_[r].size();
      Splits::word(op.payload(), 2 + size_t(op.size() + r)) = outputs_[r].size();
      if (!op.takesPart(r)) continue;
      sent += mix(op.rank(), r, inputs_[r].size());
      received += mix(r, op.rank(), outputs_[r].size());
    }
    Splits::word(op.payload(), 0) = sent;
    Splits::word(op.payload(), 1) = received;
  }

  Status checkSplits(Operation& op) const {
    uint64_t sent = 0, received = 0;
    for (const int r : op.ranks()) {
      if (op.slot(r).payloadBytes < splits_.bytes())
        return op.payloadOf(r, splits_.bytes()).status();
      sent += splits_.word(op.slot(r).payload, 0);
      received += splits_.word(op.slot(r).payload, 1);
    }
    if (sent == received) return {};
    std::string misfits;
    for (const int from : op.ranks()) {
      for (const int to : op.ranks()) {
        const uint64_t out = splits_.sends(op.slot(from).payload, to),
                       in = splits_.receives(op.slot(to).payload, from);
        if (out == in || misfits.size() > 500) continue;
        misfits += (misfits.empty() ? "" : "; ") + op.group().nameRank(from) + " sends " +
                   std::to_string(out) + " bytes to " + op.group().nameRank(to) +
                   ", which expects " + std::to_string(in);
      }
    }
    return op.agree(
        {ErrorCode::kMismatch, "the splits do not fit: " + misfits + ". Nothing was changed"});
  }

  Status take(Operation& op) const {
    const int rank = op.rank();
    if (!inputs_[rank].empty())
      std::memmove(outputs_[rank].data(), inputs_[rank].data(), inputs_[rank].size());
    Fetches fetches(op);
    for (const int from : op.others()) {
      const Slot& slot = op.slot(from);
      size_t at = splits_.bytes();
      for (int to = 0; to < rank; ++to) {
        if (to == from) continue;
        at += isLarge(op, from) ? sizeof(RemoteRegion) : splits_.sends(slot.payload, to);
      }
      const size_t length = isLarge(op, from) ? sizeof(RemoteRegion) : outputs_[from].size();
      if (at > slot.payloadBytes || length > slot.payloadBytes - at)
        return op.payloadOf(from, at + length).status();
      if (isLarge(op, from)) {
        RemoteRegion region;
        std::memcpy(&region, slot.payload + at, sizeof(region));
        MOONCAKE_TRY(fetches.start(from, region, 0, outputs_[from]));
      } else if (length) {
        std::memcpy(outputs_[from].data(), slot.payload + at, length);
      }
    }
    MOONCAKE_TRY(fetches.await());
    zeroMissing(op, outputs_);
    return {};
  }

  const std::span<const ConstSpan> inputs_;
  const std::span<const Span> outputs_;
  const Splits splits_;
  size_t total_ = 0;
  bool isSmall_ = false;
  bool isAnyLarge_ = false;  // somebody's data is fetched
  std::vector<MemoryRegion> regions_;
};

}  // namespace

Status alltoall(Group& group, std::span<const ConstSpan> inputs, std::span<const Span> outputs,
                DType dtype, Deadline deadline) {
  Alltoall alltoall(group, inputs, outputs);
  return Operation(group, {.verb = Verb::kAlltoall, .dtype = dtype}, deadline).run(alltoall);
}

}  // namespace mooncake
