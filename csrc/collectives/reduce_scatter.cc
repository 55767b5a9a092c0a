// Small (n*s fits a slot): one exchange of slots, every rank reduces its part of each. Large: every
// rank fetches its part of the n-1 other inputs, (n-1)s bytes in and out of each rank, then all
// tell all that they have it.
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/operation.h"
#include "collectives/segment_reduce.h"

namespace mooncake {
namespace {

Status small(Operation& op, ConstSpan input, Span output, Reduction reduction) {
  if (!input.empty()) std::memcpy(op.payload(), input.data(), input.size());
  MOONCAKE_TRY(op.begin(input.size()));
  MOONCAKE_TRY(op.awaitAllBegun());
  const auto sources = op.group().sources();
  for (int r = 0; r < op.size(); ++r) {
    auto payload = op.payloadOf(r, input.size());
    if (!payload.ok()) return payload.error();
    sources[r] = *payload + size_t(op.rank()) * output.size();
  }
  reduceSources(reduction, output.data(), sources, output.size() / dtypeSize(reduction.dtype));
  return op.commit();
}

Status large(Operation& op, ConstSpan input, Span output, Reduction reduction) {
  // Peers only read; the table knows addresses without const.
  auto region = op.group().engine().regions().add(const_cast<std::byte*>(input.data()),
                                                  input.size(), kRemoteRead);
  if (!region.ok()) return op.fail(region.error());
  op.announceInput(region->remote());
  MOONCAKE_TRY(op.begin(0));
  MOONCAKE_TRY(op.awaitAllBegun());
  const size_t offset = size_t(op.rank()) * output.size();
  MOONCAKE_TRY(reduceSegment(op, reduction, input.subspan(offset, output.size()), offset, output));
  return op.finish();
}

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
  MOONCAKE_TRY(op.open());
  return input.size() <= group.eagerBytes() ? small(op, input, output, reduction)
                                            : large(op, input, output, reduction);
}

}  // namespace mooncake
