// Small: one exchange of slots. Large: every rank fetches s bytes from each of the n-1 other ranks,
// starting with its right neighbour, so that no rank is asked by all at once. (n-1)s bytes in and
// out of each rank, one copy where the memory can be read.
#include <cstring>
#include <vector>

#include "collectives/buffers.h"
#include "collectives/collectives.h"
#include "collectives/fed_pieces.h"
#include "group/fetches.h"
#include "group/operation.h"

namespace mooncake {
namespace {

class AllgatherEager final : public Algorithm {
 public:
  AllgatherEager(Buffers inputs, std::span<const Span> outputs)
      : inputs_(inputs), outputs_(outputs) {}

  Status publish(Operation& op) override {
    packForPeers(op, inputs_);
    return op.begin(packedBytes(inputs_));
  }
  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    if (size_t(op.rank()) * inputs_.size() >= outputs_.size()) return op.agreeNoPart();
    const size_t bytes = packedBytes(inputs_);
    for (const int r : op.ranks()) {
      auto payload = op.payloadOf(r, bytes);
      if (!payload.ok()) return payload.error();
      const std::byte* given = *payload;
      for (size_t i = 0; i < inputs_.size(); ++i) {
        const Span output = outputs_[size_t(r) * inputs_.size() + i];
        if (!output.empty()) std::memcpy(output.data(), given, output.size());
        given += aligned(output.size());
      }
    }
    zeroMissing(op, outputs_, inputs_.size());
    return op.commit();
  }

 private:
  const Buffers inputs_;
  const std::span<const Span> outputs_;
};

class AllgatherRendezvous final : public Algorithm {
 public:
  AllgatherRendezvous(Buffers inputs, std::span<const Span> outputs)
      : inputs_(inputs), outputs_(outputs) {}

  Status publish(Operation& op) override {
    auto table = announceBuffers(op, inputs_, regions_);
    if (!table.ok()) return table.error();
    MOONCAKE_TRY(op.begin(*table));
    // Nothing is written to the outputs before all calls are known to agree.
    MOONCAKE_TRY(op.awaitAllBegun());
    const size_t count = inputs_.size();
    if (size_t(op.rank()) * count >= outputs_.size()) return op.agreeNoPart();
    for (size_t i = 0; i < count; ++i) {
      const Span input = inputs_[i].data, output = outputs_[size_t(op.rank()) * count + i];
      if (output.data() != input.data() && !input.empty())
        std::memmove(output.data(), input.data(), input.size());
    }
    Fetches fetches(op);
    for (const int from : op.others()) {
      for (size_t i = 0; i < count; ++i) {
        auto buffer = announcedBuffer(op, from, i, count);
        if (!buffer.ok()) return buffer.error();
        MOONCAKE_TRY(fetches.start(from, *buffer, 0, outputs_[size_t(from) * count + i]));
      }
    }
    return fetches.await();
  }
  Status complete(Operation& op) override {
    zeroMissing(op, outputs_, inputs_.size());
    return op.commitDone();
  }
  void rollBack(Operation&, Rollback) override { regions_.clear(); }

 private:
  const Buffers inputs_;
  const std::span<const Span> outputs_;
  std::vector<MemoryRegion> regions_;
};

Status allgatherPiece(Group& group, const Call& call, Buffers inputs, std::span<const Span> outputs,
                      Deadline deadline) {
  Operation op(group, call, deadline);
  if (packedBytes(inputs) <= mostGatheredInSlots(group, inputs.size())) {
    AllgatherEager eager(inputs, outputs);
    return op.run(eager);
  }
  AllgatherRendezvous rendezvous(inputs, outputs);
  return op.run(rendezvous);
}

}  // namespace

size_t mostGatheredInSlots(const Group& group, size_t inputs) {
  return inputs > 1 ? group.slotBytes() : group.eagerBytes();
}

Status allgather(Group& group, Buffers inputs, std::span<const Span> outputs, Deadline deadline) {
  if (packedBytes(inputs) > mostGatheredInSlots(group, inputs.size()))
    MOONCAKE_TRY(checkTableOf(group, inputs.size()));
  const Call call = callForParts(callOf({.verb = Verb::kAllgather}, inputs), group,
                                 outputs.size() / inputs.size());
  return allgatherPiece(group, call, inputs, outputs, deadline);
}

Status allgather(Group& group, ConstSpan input, std::span<const Span> outputs, DType dtype,
                 Deadline deadline, InputFeed* feed) {
  const Buffer buffer = readOnly(input, dtype);
  if (!feed) return allgather(group, Buffers(&buffer, 1), outputs, deadline);
  const Call call =
      callForParts(callOf({.verb = Verb::kAllgather}, Buffers(&buffer, 1)), group, outputs.size());
  return runFed(group, call, *feed, input.size(), fedPieceBytes(input.size()), OnLoss::kRunAgain,
                [&](const Call& each, size_t begin, size_t bytes) {
                  const Buffer piece{buffer.data.subspan(begin, bytes), dtype};
                  return allgatherPiece(group, each, Buffers(&piece, 1),
                                        pieceOf(outputs, begin, bytes), deadline);
                });
}

}  // namespace mooncake
