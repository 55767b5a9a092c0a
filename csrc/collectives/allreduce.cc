// Small: one exchange of slots, every rank reduces all n contributions itself: n*s bytes read per
// rank, one round.
//
// Large: reduce-scatter and allgather by direct fetches (the two halves of Rabenseifner's
// algorithm, without its recursive halving: one step each, since every rank reaches every other at
// the same cost).
//   1. Rank r reduces segment r of everybody's input into memory that its peers can reach, and says
//   `ready`.
//   2. Everybody takes all segments. Until then the input can be put back: an operation that does
//      not get there can be run again among the survivors.
// 2s(n-1)/n bytes in and out of each rank. Where some part of the group is not mapped, the input is
// copied aside before anything is written over it; where all of it is mapped, results outlive their
// ranks, so `ready` of all ranks is the commit.
#include <algorithm>
#include <cstring>

#include "base/bytes.h"
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

// Where the ranks' shares of the result lie in the regions that they announced with `ready`.
enum class Shares { kAlone, kWithinTheData };

Status takeSegments(Operation& op, Span data, Shares shares) {
  Fetches fetches(op);
  for (int step = 1; step < op.size(); ++step) {
    const int from = (op.rank() + step) % op.size();
    const Span segment = segmentOf(from, op.size(), data);
    const size_t offset =
        shares == Shares::kWithinTheData ? size_t(segment.data() - data.data()) : 0;
    MOONCAKE_TRY(fetches.start(from, op.slot(from).result, offset, segment));
  }
  return fetches.await();
}

// The data as it was, put back unless the operation commits.
class Undo {
 public:
  explicit Undo(Span data) : data_(data) {}
  ~Undo() {
    if (copy_) std::memcpy(data_.data(), copy_, data_.size());
  }
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;

  Status take(Group& group) {
    auto room = group.undo(data_.size());
    if (!room.ok()) return room.error();
    copyPastCache(*room, data_);
    copy_ = *room;
    return {};
  }
  void forget() { copy_ = nullptr; }

 private:
  const Span data_;
  const std::byte* copy_ = nullptr;
};

Status large(Operation& op, Span data, Reduction reduction, int root) {
  Group& group = op.group();
  const bool mapped = group.window().fullyMapped();
  const bool takesResult = root < 0 || root == op.rank();
  auto region = group.engine().regions().add(data.data(), data.size(), kRemoteRead);
  if (!region.ok()) return op.fail(region.error());
  op.announceInput(region->remote());
  MOONCAKE_TRY(op.begin(0));
  MOONCAKE_TRY(op.awaitAllBegun());

  // Over messages every rank waits in finish() until its share has been fetched: the share may lie
  // in the data. In memory it must outlive the operation.
  const Shares shares = !mapped && root < 0 ? Shares::kWithinTheData : Shares::kAlone;
  const Span mine = segmentOf(op.rank(), op.size(), data);
  Span share = mine;
  RemoteRegion result = region->remote();
  if (shares == Shares::kAlone) {
    auto block = group.shared(std::max<size_t>(mine.size(), 1));
    if (!block.ok()) return op.fail(block.error());
    share = {block->data, mine.size()};
    result = block->region;
  }
  Undo undo(data);
  MOONCAKE_TRY(
      reduceSegment(op, reduction, mine, size_t(mine.data() - data.data()), share, [&]() -> Status {
        // The copy costs nothing while the first fetches are on their way.
        return takesResult && !mapped ? undo.take(group) : Status();
      }));
  MOONCAKE_TRY(op.publishReady(result));
  for (int r = 0; r < op.size(); ++r) MOONCAKE_TRY(op.awaitReady(r));
  // Everybody is through with the inputs, and ours is about to be written over: from here on nobody
  // may read it. (ThreadSanitizer, too, learns here that they have read it: it cannot follow
  // stamps, which peers in this process reach under another address.)
  if (shares == Shares::kAlone) *region = MemoryRegion();

  if (takesResult) {
    MOONCAKE_TRY(takeSegments(op, data, shares));
    if (share.data() != mine.data()) std::memcpy(mine.data(), share.data(), mine.size());
  }
  if (mapped) return op.commit();
  MOONCAKE_TRY(op.finish());
  undo.forget();
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
                                                    : large(op, piece, reduction, root));
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
