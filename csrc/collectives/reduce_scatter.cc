// Small (n*s fits a slot): one exchange of slots, every rank reduces its part of each. Large: every
// rank fetches its part of the n-1 other inputs, (n-1)s bytes in and out of each rank, then all
// tell all that they have it.
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/operation.h"
#include "collectives/segment_reduce.h"

namespace mooncake {
namespace {

class Small final : public Algorithm {
 public:
  Small(ConstSpan input, Span output, Reduction reduction)
      : input_(input), output_(output), reduction_(reduction) {}

  Status contribute(Operation& op) override {
    if (!input_.empty()) std::memcpy(op.payload(), input_.data(), input_.size());
    return op.begin(input_.size());
  }
  Status conclude(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    const auto sources = op.group().sources().first(op.ranks().size());
    for (size_t i = 0; i < sources.size(); ++i) {
      auto payload = op.payloadOf(op.ranks()[i], input_.size());
      if (!payload.ok()) return payload.error();
      sources[i] = *payload + size_t(op.rank()) * output_.size();
    }
    reduceSources(reduction_, output_.data(), sources,
                  output_.size() / dtypeSize(reduction_.dtype));
    return op.commit(Operation::When::kAllBegan);
  }

 private:
  const ConstSpan input_;
  const Span output_;
  const Reduction reduction_;
};

class Large final : public Algorithm {
 public:
  Large(ConstSpan input, Span output, Reduction reduction)
      : input_(input), output_(output), reduction_(reduction) {}

  Status contribute(Operation& op) override {
    // Peers only read; the table knows addresses without const.
    auto region = op.group().engine().regions().add(const_cast<std::byte*>(input_.data()),
                                                    input_.size(), kRemoteRead);
    if (!region.ok()) return region.error();
    region_ = std::move(*region);
    op.announceInput(region_.remote());
    MOONCAKE_TRY(op.begin(0));
    MOONCAKE_TRY(op.awaitAllBegun());
    const size_t offset = size_t(op.rank()) * output_.size();
    return reduceSegment(op, reduction_, input_.subspan(offset, output_.size()), offset, output_);
  }
  Status conclude(Operation& op) override { return op.commitDone(); }
  void rollBack(Operation&, Then) override { region_ = MemoryRegion(); }

 private:
  const ConstSpan input_;
  const Span output_;
  const Reduction reduction_;
  MemoryRegion region_;
};

}  // namespace

Status reduceScatter(Group& group, ConstSpan input, Span output, Reduction reduction,
                     Deadline deadline) {
  MOONCAKE_TRY(checkReduction(reduction));
  Operation op(group,
               {.verb = Verb::kReduceScatter,
                .dtype = reduction.dtype,
                .reduce = reduction.kind,
                .count = output.size() / dtypeSize(reduction.dtype)},
               deadline);
  if (input.size() <= group.eagerBytes()) {
    Small small(input, output, reduction);
    return op.run(small);
  }
  Large large(input, output, reduction);
  return op.run(large);
}

}  // namespace mooncake
