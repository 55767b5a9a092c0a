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

Status small(Operation& op, ConstSpan input, std::span<const Span> outputs) {
  if (!input.empty()) std::memcpy(op.payload(), input.data(), input.size());
  MOONCAKE_TRY(op.begin(input.size()));
  MOONCAKE_TRY(op.awaitAllBegun());
  for (int r = 0; r < op.size(); ++r) {
    auto payload = op.payloadOf(r, input.size());
    if (!payload.ok()) return payload.error();
    if (!input.empty()) std::memcpy(outputs[r].data(), *payload, input.size());
  }
  return op.commit();
}

Status large(Operation& op, ConstSpan input, std::span<const Span> outputs) {
  // Peers only read; the table knows addresses without const.
  auto region = op.group().engine().regions().add(const_cast<std::byte*>(input.data()),
                                                  input.size(), kRemoteRead);
  if (!region.ok()) return op.fail(region.error());
  op.announceInput(region->remote());
  MOONCAKE_TRY(op.begin(0));
  // Nothing is written to the outputs before all calls are known to agree.
  MOONCAKE_TRY(op.awaitAllBegun());
  copyOwn(input, outputs[op.rank()]);
  Fetches fetches(op);
  for (int step = 1; step < op.size(); ++step) {
    const int from = (op.rank() + step) % op.size();
    MOONCAKE_TRY(fetches.start(from, op.slot(from).input, 0, outputs[from]));
  }
  MOONCAKE_TRY(fetches.await());
  return op.finish();
}

}  // namespace

Status allgather(Group& group, ConstSpan input, std::span<const Span> outputs, DType dtype,
                 Deadline deadline) {
  Operation op(group,
               {.verb = Verb::kAllgather, .dtype = dtype, .count = input.size() / dtypeSize(dtype)},
               deadline);
  MOONCAKE_TRY(op.open());
  return input.size() <= group.eagerBytes() ? small(op, input, outputs) : large(op, input, outputs);
}

}  // namespace mooncake
