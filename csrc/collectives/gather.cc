// Small: one exchange of slots; s bytes go to every rank, so that each can supply the root with the
// part of a rank that dies. Large: the root fetches s bytes from each of the n-1 other ranks,
// starting with its right neighbour, then every rank signals to all that it is done.
#include <cstring>
#include <vector>

#include "collectives/buffers.h"
#include "collectives/collectives.h"
#include "collectives/fed_pieces.h"
#include "group/fetches.h"
#include "group/operation.h"

namespace mooncake {
namespace {

class Gather : public Algorithm {
 public:
  Gather(ConstSpan input, std::span<const Span> outputs, DType dtype, int root)
      : input_(readOnly(input, dtype)), outputs_(outputs), root_(root) {}

 protected:
  const Buffer input_;
  const std::span<const Span> outputs_;
  const int root_;
};

class GatherEager final : public Gather {
 public:
  using Gather::Gather;

  Status publish(Operation& op) override {
    packForPeers(op, Buffers(&input_, 1));
    return op.begin(input_.data.size());
  }
  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    if (!op.takesPart(root_)) return op.agreeRootLost(root_);
    if (op.rank() == root_) {
      for (const int r : op.ranks()) {
        auto payload = op.payloadOf(r, input_.data.size());
        if (!payload.ok()) return payload.error();
        if (!input_.data.empty())
          std::memcpy(outputs_[size_t(r)].data(), *payload, input_.data.size());
      }
      zeroMissing(op, outputs_);
    }
    return op.commit();
  }
};

class GatherRendezvous final : public Gather {
 public:
  using Gather::Gather;

  Status publish(Operation& op) override {
    auto table = announceBuffers(op, Buffers(&input_, 1), regions_);
    if (!table.ok()) return table.error();
    MOONCAKE_TRY(op.begin(*table));
    MOONCAKE_TRY(op.awaitAllBegun());
    if (!op.takesPart(root_)) return op.agreeRootLost(root_);
    if (op.rank() != root_) return {};
    const Span own = outputs_[size_t(root_)];
    if (own.data() != input_.data.data())
      std::memmove(own.data(), input_.data.data(), input_.data.size());
    Fetches fetches(op);
    for (const int from : op.others())
      MOONCAKE_TRY(fetches.start(from, op.slot(from).input, 0, outputs_[size_t(from)]));
    return fetches.await();
  }
  Status complete(Operation& op) override {
    if (op.rank() == root_) zeroMissing(op, outputs_);
    return op.commitDone();
  }
  void rollBack(Operation&, Rollback) override { regions_.clear(); }

 private:
  std::vector<MemoryRegion> regions_;
};

Status gatherPiece(Group& group, const Call& call, ConstSpan input, std::span<const Span> outputs,
                   Deadline deadline) {
  Operation op(group, call, deadline);
  if (input.size() <= group.eagerBytes()) {
    GatherEager eager(input, outputs, call.dtype, call.root);
    return op.run(eager);
  }
  GatherRendezvous rendezvous(input, outputs, call.dtype, call.root);
  return op.run(rendezvous);
}

}  // namespace

Status gather(Group& group, ConstSpan input, std::span<const Span> outputs, DType dtype, int root,
              Deadline deadline, InputFeed* feed, size_t parts) {
  const Call call = callWithRoot(Verb::kGather, readOnly(input, dtype), root, group, parts);
  if (!feed) return gatherPiece(group, call, input, outputs, deadline);
  return runFed(group, call, *feed, input.size(), fedPieceBytes(input.size()), OnLoss::kRunAgain,
                [&](const Call& each, size_t begin, size_t bytes) {
                  return gatherPiece(group, each, input.subspan(begin, bytes),
                                     pieceOf(outputs, begin, bytes), deadline);
                });
}

}  // namespace mooncake
