// Small: the data stands in the root's slot. One exchange, s bytes out of the root per rank that
// does not map it. Large: every rank fetches s bytes from the root's memory, then all tell all that
// they have them.
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/operation.h"

namespace mooncake {
namespace {

Status small(Operation& op, Span data, int root) {
  const bool isRoot = op.rank() == root;
  if (isRoot && !data.empty()) std::memcpy(op.payload(), data.data(), data.size());
  MOONCAKE_TRY(op.begin(isRoot ? data.size() : 0));
  MOONCAKE_TRY(op.awaitAllBegun());
  if (!isRoot) {
    auto payload = op.payloadOf(root, data.size());
    if (!payload.ok()) return payload.error();
    if (!data.empty()) std::memcpy(data.data(), *payload, data.size());
  }
  return op.commit();
}

Status large(Operation& op, Span data, int root) {
  const bool isRoot = op.rank() == root;
  MemoryRegion region;
  if (isRoot) {
    auto added = op.group().engine().regions().add(data.data(), data.size(), kRemoteRead);
    if (!added.ok()) return op.fail(added.error());
    region = std::move(*added);
    op.announceInput(region.remote());
  }
  // Over messages the head travels with the announcement: the wire is busy while the receivers ask
  // for the rest.
  const bool mapped = op.group().window().fullyMapped();
  const Span head = data.first(mapped ? 0 : op.group().eagerBytes());
  if (isRoot && !mapped) std::memcpy(op.payload(), head.data(), head.size());
  MOONCAKE_TRY(op.begin(isRoot ? head.size() : 0));
  MOONCAKE_TRY(op.awaitAllBegun());
  if (!isRoot) {
    auto payload = op.payloadOf(root, head.size());
    if (!payload.ok()) return payload.error();
    Fetches fetches(op);
    MOONCAKE_TRY(fetches.start(root, op.slot(root).input, head.size(), data.subspan(head.size())));
    if (!mapped) std::memcpy(head.data(), *payload, head.size());
    MOONCAKE_TRY(fetches.await());
  }
  return op.finish();
}

}  // namespace

Status broadcast(Group& group, Span data, DType dtype, int root, Deadline deadline) {
  Operation op(group,
               {.verb = Verb::kBroadcast,
                .dtype = dtype,
                .root = root,
                .count = data.size() / dtypeSize(dtype)},
               deadline);
  MOONCAKE_TRY(op.open());
  const size_t eager = group.window().fullyMapped() ? group.eagerBytes() : group.slotBytes();
  return data.size() <= eager ? small(op, data, root) : large(op, data, root);
}

}  // namespace mooncake
