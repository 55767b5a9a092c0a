// Small: one exchange of slots, every rank reduces all n contributions itself: n*s bytes read per
// rank, one round.
//
// Large: reduce-scatter and allgather by direct fetches (the two halves of Rabenseifner's
// algorithm, without its recursive halving: one step each, since every rank reaches every other at
// the same cost).
//   1. Rank r reduces segment r of everybody's input into memory that its peers can reach, and says
//   `ready`.
//   2. Everybody takes all segments. The input stays as it was until then: an operation that does
//   not get there
//      can be run again among the survivors.
// 2s(n-1)/n bytes in and out of each rank. Where some part of the group is not mapped, segments
// land beside the input first and are copied over it when all have them all; where all of it is
// mapped, results outlive their ranks, so `ready` of all ranks is the commit.
#include <algorithm>
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/operation.h"
#include "collectives/segment_reduce.h"

namespace mooncake {
namespace {

// More than this is done piece by piece; an error in between then leaves the data half reduced. 32
// MiB covers DDP's buckets of 25 MiB.
constexpr size_t kUndoBytes = 32 << 20;

Status small(Operation& op, Span data, Reduction reduction, bool takesResult) {
  if (!data.empty()) std::memcpy(op.payload(), data.data(), data.size());
  MOONCAKE_TRY(op.begin(data.size()));
  MOONCAKE_TRY(op.awaitAllBegun());
  if (!takesResult) return op.commit();
  const auto sources = op.group().sources();
  for (int r = 0; r < op.size(); ++r) {
    auto payload = op.payloadOf(r, data.size());
    if (!payload.ok()) return payload.error();
    sources[r] = *payload;
  }
  reduceSources(reduction, data.data(), sources, data.size() / dtypeSize(reduction.dtype));
  return op.commit();
}

// Rank r's share of the data: cache lines, so that no two ranks write to the same one.
Span segmentOf(int rank, int size, Span data) {
  constexpr size_t kLine = 64;
  const size_t lines = (data.size() + kLine - 1) / kLine;
  const size_t start = std::min(lines * size_t(rank) / size_t(size) * kLine, data.size());
  const size_t end = std::min(lines * (size_t(rank) + 1) / size_t(size) * kLine, data.size());
  return data.subspan(start, end - start);
}

Status takeSegments(Operation& op, Span target) {
  Fetches fetches(op);
  for (int step = 1; step < op.size(); ++step) {
    const int from = (op.rank() + step) % op.size();
    MOONCAKE_TRY(fetches.start(from, op.slot(from).result, 0, segmentOf(from, op.size(), target)));
  }
  return fetches.await();
}

Status large(Operation& op, Span data, Reduction reduction, bool takesResult) {
  Group& group = op.group();
  auto region = group.engine().regions().add(data.data(), data.size(), kRemoteRead);
  if (!region.ok()) return op.fail(region.error());
  op.announceInput(region->remote());
  MOONCAKE_TRY(op.begin(0));
  MOONCAKE_TRY(op.awaitAllBegun());

  const Span mine = segmentOf(op.rank(), op.size(), data);
  auto reduced = group.shared(std::max<size_t>(mine.size(), 1));
  if (!reduced.ok()) return op.fail(reduced.error());
  MOONCAKE_TRY(reduceSegment(op, reduction, mine, size_t(mine.data() - data.data()),
                             {reduced->data, mine.size()}));
  MOONCAKE_TRY(op.publishReady(reduced->region));
  for (int r = 0; r < op.size(); ++r) MOONCAKE_TRY(op.awaitReady(r));

  if (group.window().fullyMapped()) {
    if (takesResult) {
      MOONCAKE_TRY(takeSegments(op, data));
      std::memcpy(mine.data(), reduced->data, mine.size());
    }
    return op.commit();
  }
  auto landing = group.landing(data.size());
  if (!landing.ok()) return op.fail(landing.error());
  if (takesResult) MOONCAKE_TRY(takeSegments(op, {*landing, data.size()}));
  MOONCAKE_TRY(op.finish());
  if (takesResult) {
    std::memcpy(*landing + (mine.data() - data.data()), reduced->data, mine.size());
    std::memcpy(data.data(), *landing, data.size());
  }
  return {};
}

Status reduceTo(Group& group, Verb verb, Span data, Reduction reduction, int root,
                Deadline deadline) {
  MOONCAKE_TRY(checkReduction(reduction));
  const bool takesResult = root < 0 || root == group.rank();
  do {
    const Span piece = data.first(std::min(data.size(), kUndoBytes));
    Operation op(group,
                 {.verb = verb,
                  .dtype = reduction.dtype,
                  .reduce = reduction.kind,
                  .root = root,
                  .count = data.size() / dtypeSize(reduction.dtype)},
                 deadline);
    MOONCAKE_TRY(op.open());
    MOONCAKE_TRY(piece.size() <= group.eagerBytes() ? small(op, piece, reduction, takesResult)
                                                    : large(op, piece, reduction, takesResult));
    data = data.subspan(piece.size());
  } while (!data.empty());
  return {};
}

}  // namespace

Status allreduce(Group& group, Span data, Reduction reduction, Deadline deadline) {
  return reduceTo(group, Verb::kAllreduce, data, reduction, -1, deadline);
}

Status reduce(Group& group, Span data, Reduction reduction, int root, Deadline deadline) {
  return reduceTo(group, Verb::kReduce, data, reduction, root, deadline);
}

}  // namespace mooncake
