// Small (n*s fits a slot): one exchange of slots, every rank reduces its part of each. Large: every
// rank fetches its part of the n-1 other inputs, (n-1)s bytes in and out of each rank, then every
// rank signals to all that it has it.
#include <vector>

#include "collectives/buffers.h"
#include "collectives/collectives.h"
#include "collectives/fed_pieces.h"
#include "collectives/segment_reduce.h"
#include "group/operation.h"

namespace mooncake {
namespace {

class ReduceScatter : public Algorithm {
 public:
  ReduceScatter(Buffers inputs, Buffers outputs, size_t parts, ReduceKind kind)
      : inputs_(inputs), outputs_(outputs), parts_(parts), kind_(kind) {}

 protected:
  bool hasPart(const Operation& op) const { return size_t(op.rank()) < parts_; }
  // Place of this rank's part of input `output`: the buffer, and the offset in it.
  struct Place {
    size_t buffer;
    size_t offset;
  };
  Place placeOf(const Operation& op, size_t output) const {
    if (inputs_.size() == outputs_.size())
      return {output, size_t(op.rank()) * outputs_[output].data.size()};
    return {output * parts_ + size_t(op.rank()), 0};
  }

  const Buffers inputs_;
  const Buffers outputs_;
  const size_t parts_;
  const ReduceKind kind_;
};

class ReduceScatterEager final : public ReduceScatter {
 public:
  using ReduceScatter::ReduceScatter;

  Status publish(Operation& op) override {
    pack(inputs_, op.payload());
    return op.begin(packedBytes(inputs_));
  }
  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    if (!hasPart(op)) return op.agreeNoPart();
    const auto sources = op.group().sources().first(op.ranks().size());
    const size_t bytes = packedBytes(inputs_);
    size_t buffer = 0, start = 0;  // start of the buffer in the payload
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const Place place = placeOf(op, i);
      for (; buffer < place.buffer; ++buffer) start += aligned(inputs_[buffer].data.size());
      for (size_t source = 0; source < sources.size(); ++source) {
        auto payload = op.payloadOf(op.ranks()[source], bytes);
        if (!payload.ok()) return payload.error();
        sources[source] = *payload + start + place.offset;
      }
      const Buffer& output = outputs_[i];
      reduceSources({output.dtype, kind_}, output.data.data(), sources,
                    output.data.size() / dtypeSize(output.dtype));
    }
    return op.commit();
  }
};

class ReduceScatterRendezvous final : public ReduceScatter {
 public:
  using ReduceScatter::ReduceScatter;

  Status publish(Operation& op) override {
    auto table = announceBuffers(op, inputs_, regions_);
    if (!table.ok()) return table.error();
    MOONCAKE_TRY(op.begin(*table));
    MOONCAKE_TRY(op.awaitAllBegun());
    if (!hasPart(op)) return op.agreeNoPart();
    std::vector<Segment> segments;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const Place place = placeOf(op, i);
      segments.push_back({.reduction = {outputs_[i].dtype, kind_},
                          .own = inputs_[place.buffer].data.data() + place.offset,
                          .buffer = place.buffer,
                          .offset = place.offset,
                          .target = outputs_[i].data});
    }
    return reduceSegments(op, segments, inputs_.size());
  }
  Status complete(Operation& op) override { return op.commitDone(); }
  void rollBack(Operation&, Rollback) override { regions_.clear(); }

 private:
  std::vector<MemoryRegion> regions_;
};

Status reducePiece(Group& group, const Call& call, Buffers inputs, Buffers outputs,
                   Deadline deadline) {
  Operation op(group, call, deadline);
  const size_t parts = call.root < 0 ? size_t(group.size()) : size_t(call.root);
  if (packedBytes(inputs) <= group.eagerBytes()) {
    ReduceScatterEager eager(inputs, outputs, parts, call.reduce);
    return op.run(eager);
  }
  ReduceScatterRendezvous rendezvous(inputs, outputs, parts, call.reduce);
  return op.run(rendezvous);
}

// Number of ranks for which the inputs have parts. Where all are empty: all ranks.
size_t partsIn(Buffers inputs, Buffers outputs, size_t size) {
  if (inputs.size() != outputs.size()) return inputs.size() / outputs.size();
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].data.empty()) return inputs[i].data.size() / outputs[i].data.size();
  }
  return size;
}

// The parts of the ranks, each as a buffer of its own.
std::vector<Buffer> partsOf(Buffers inputs, const Buffer& output, size_t size) {
  if (inputs.size() == size) return {inputs.begin(), inputs.end()};
  std::vector<Buffer> parts;
  const size_t bytes = output.data.size();
  for (size_t r = 0; r < size; ++r)
    parts.push_back({inputs[0].data.subspan(r * bytes, bytes), output.dtype});
  return parts;
}

}  // namespace

Status reduceScatter(Group& group, Buffers inputs, Buffers outputs, ReduceKind kind,
                     Deadline deadline, InputFeed* feed) {
  for (const Buffer& output : outputs) MOONCAKE_TRY(checkReduction({output.dtype, kind}));
  if (packedBytes(inputs) > group.eagerBytes()) MOONCAKE_TRY(checkTableOf(group, inputs.size()));
  const size_t count = partsIn(inputs, outputs, size_t(group.size()));
  Call call =
      callForParts(callOf({.verb = Verb::kReduceScatter, .reduce = kind}, outputs), group, count);
  if (inputs.size() > 1) call.tensors = uint32_t(inputs.size());
  if (!feed) return reducePiece(group, call, inputs, outputs, deadline);
  const Buffer& output = outputs[0];
  const std::vector<Buffer> parts = partsOf(inputs, output, count);
  MOONCAKE_TRY(checkTableOf(group, parts.size()));
  const size_t most = fedPieceBytes(output.data.size(), parts.size());
  return runFed(group, call, *feed, output.data.size(), most, OnLoss::kRunAgain,
                [&](const Call& each, size_t begin, size_t bytes) {
                  const auto pieceOf = [&](Buffer buffer) {
                    buffer.data = buffer.data.subspan(begin, bytes);
                    return buffer;
                  };
                  std::vector<Buffer> from;
                  for (const Buffer& part : parts) from.push_back(pieceOf(part));
                  const Buffer to = pieceOf(output);
                  return reducePiece(group, each, from, Buffers(&to, 1), deadline);
                });
}

Status reduceScatter(Group& group, ConstSpan input, Span output, Reduction reduction,
                     Deadline deadline, InputFeed* feed) {
  const Buffer from = readOnly(input, reduction.dtype), to{output, reduction.dtype};
  return reduceScatter(group, Buffers(&from, 1), Buffers(&to, 1), reduction.kind, deadline, feed);
}

}  // namespace mooncake
