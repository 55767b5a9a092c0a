// Small: one exchange of slots. Large: every rank fetches s bytes from each of the n-1 others,
// starting with its right neighbour so that no rank is asked by all at once; (n-1)s bytes in and
// out of each rank, one copy where the memory can be read.
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/operation.h"

namespace mooncake {
namespace {

void copyOwn(ConstSpan input, Span output) {
  if (output.data() != input.data() && !input.empty())
    std::memmove(output.data(), input.data(), input.size());
}

class Small final : public Algorithm {
 public:
  Small(ConstSpan input, std::span<const Span> outputs) : input_(input), outputs_(outputs) {}

  Status contribute(Operation& op) override {
    if (!input_.empty()) std::memcpy(op.payload(), input_.data(), input_.size());
    return op.begin(input_.size());
  }
  Status conclude(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    for (const int r : op.ranks()) {
      auto payload = op.payloadOf(r, input_.size());
      if (!payload.ok()) return payload.error();
      if (!input_.empty()) std::memcpy(outputs_[r].data(), *payload, input_.size());
    }
    zeroMissing(op, outputs_);
    return op.commit(Operation::When::kAllBegan);
  }

 private:
  const ConstSpan input_;
  const std::span<const Span> outputs_;
};

class Large final : public Algorithm {
 public:
  Large(ConstSpan input, std::span<const Span> outputs) : input_(input), outputs_(outputs) {}

  Status contribute(Operation& op) override {
    // Peers only read; the table knows addresses without const.
    auto region = op.group().engine().regions().add(const_cast<std::byte*>(input_.data()),
                                                    input_.size(), kRemoteRead);
    if (!region.ok()) return region.error();
    region_ = std::move(*region);
    op.announceInput(region_.remote());
    MOONCAKE_TRY(op.begin(0));
    // Nothing is written to the outputs before all calls are known to agree.
    MOONCAKE_TRY(op.awaitAllBegun());
    copyOwn(input_, outputs_[op.rank()]);
    Fetches fetches(op);
    for (const int from : op.others()) {
      MOONCAKE_TRY(fetches.start(from, op.slot(from).input, 0, outputs_[from]));
    }
    return fetches.await();
  }
  Status conclude(Operation& op) override {
    zeroMissing(op, outputs_);
    return op.commitDone();
  }
  void rollBack(Operation&, Then) override { region_ = MemoryRegion(); }

 private:
  const ConstSpan input_;
  const std::span<const Span> outputs_;
  MemoryRegion region_;
};

}  // namespace

Status allgather(Group& group, ConstSpan input, std::span<const Span> outputs, DType dtype,
                 Deadline deadline) {
  Operation op(group,
               {.verb = Verb::kAllgather, .dtype = dtype, .count = input.size() / dtypeSize(dtype)},
               deadline);
  if (input.size() <= group.eagerBytes()) {
    Small small(input, outputs);
    return op.run(small);
  }
  Large large(input, outputs);
  return op.run(large);
}

}  // namespace mooncake
