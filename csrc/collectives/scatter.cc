// Small (n*s fits a slot): all parts stand in the root's slot. One exchange, n*s bytes out of the
// root per rank that does not map it. Large: the root's slot announces one region per rank, every
// rank fetches its s bytes, then every rank signals to all that it has them.
#include <cstring>
#include <vector>

#include "collectives/buffers.h"
#include "collectives/collectives.h"
#include "collectives/fed_pieces.h"
#include "group/fetches.h"
#include "group/operation.h"

namespace mooncake {
namespace {

class Scatter : public Algorithm {
 public:
  Scatter(Buffers inputs, Span output, int root, size_t parts)
      : inputs_(inputs), output_(output), root_(root), parts_(parts) {}

 protected:
  const Buffers inputs_;  // empty on other ranks than the root
  const Span output_;
  const int root_;
  const size_t parts_;
};

class ScatterEager final : public Scatter {
 public:
  using Scatter::Scatter;

  Status publish(Operation& op) override {
    packForPeers(op, inputs_);
    return op.begin(packedBytes(inputs_));
  }
  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    if (!op.takesPart(root_)) return op.agreeRootLost(root_);
    const size_t stride = aligned(output_.size());
    auto payload = op.payloadOf(root_, stride * (parts_ - 1) + output_.size());
    if (!payload.ok()) return payload.error();
    if (!output_.empty())
      std::memcpy(output_.data(), *payload + stride * size_t(op.rank()), output_.size());
    return op.commit();
  }
};

class ScatterRendezvous final : public Scatter {
 public:
  using Scatter::Scatter;

  Status publish(Operation& op) override {
    size_t table = 0;
    if (op.rank() == root_) {
      auto announced = announceBuffers(op, inputs_, regions_);
      if (!announced.ok()) return announced.error();
      table = *announced;
    }
    MOONCAKE_TRY(op.begin(table));
    MOONCAKE_TRY(op.awaitAllBegun());
    if (!op.takesPart(root_)) return op.agreeRootLost(root_);
    if (op.rank() == root_) {
      const Span own = inputs_[size_t(root_)].data;
      if (own.data() != output_.data()) std::memmove(output_.data(), own.data(), own.size());
      return {};
    }
    auto part = announcedBuffer(op, root_, size_t(op.rank()), parts_);
    if (!part.ok()) return part.error();
    Fetches fetches(op);
    MOONCAKE_TRY(fetches.start(root_, *part, 0, output_));
    return fetches.await();
  }
  Status complete(Operation& op) override { return op.commitDone(); }
  void rollBack(Operation&, Rollback) override { regions_.clear(); }

 private:
  std::vector<MemoryRegion> regions_;
};

Status scatterPiece(Group& group, const Call& call, std::span<const ConstSpan> inputs, Span output,
                    size_t parts, Deadline deadline) {
  std::vector<Buffer> buffers;
  for (const ConstSpan input : inputs) buffers.push_back(readOnly(input, call.dtype));
  Operation op(group, call, deadline);
  if (parts * aligned(output.size()) <= group.eagerBytes()) {
    ScatterEager eager(buffers, output, call.root, parts);
    return op.run(eager);
  }
  ScatterRendezvous rendezvous(buffers, output, call.root, parts);
  return op.run(rendezvous);
}

}  // namespace

Status scatter(Group& group, std::span<const ConstSpan> inputs, Span output, DType dtype, int root,
               Deadline deadline, InputFeed* feed, size_t parts) {
  const Call call = callWithRoot(Verb::kScatter, {output, dtype}, root, group, parts);
  if (parts == 0) parts = size_t(group.size());
  if (!feed) return scatterPiece(group, call, inputs, output, parts, deadline);
  const size_t most = fedPieceBytes(output.size(), parts);
  return runFed(group, call, *feed, output.size(), most, OnLoss::kGoOn,
                [&](const Call& each, size_t begin, size_t bytes) {
                  return scatterPiece(group, each, pieceOf(inputs, begin, bytes),
                                      output.subspan(begin, bytes), parts, deadline);
                });
}

}  // namespace mooncake
