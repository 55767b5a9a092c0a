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
#include <memory>

#include "base/bytes.h"
#include "base/failpoint.h"
#include "collectives/collectives.h"
#include "collectives/operation.h"
#include "collectives/segment_reduce.h"

namespace mooncake {
namespace {

// More than this is done piece by piece; a rank that is lost in between then leaves the data half
// reduced. 32 MiB covers DDP's buckets of 25 MiB.
constexpr size_t kUndoBytes = 32 << 20;

class Small final : public Algorithm {
 public:
  Small(Span data, Reduction reduction, int root)
      : data_(data), reduction_(reduction), root_(root) {}

  Status contribute(Operation& op) override {
    if (!data_.empty()) std::memcpy(op.payload(), data_.data(), data_.size());
    return op.begin(data_.size());
  }
  Status conclude(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    if (root_ >= 0 && !op.takesPart(root_)) return op.agreeRootLost(root_);
    if (root_ < 0 || root_ == op.rank()) {
      const auto sources = op.group().sources().first(op.ranks().size());
      for (size_t i = 0; i < sources.size(); ++i) {
        auto payload = op.payloadOf(op.ranks()[i], data_.size());
        if (!payload.ok()) return payload.error();
        sources[i] = *payload;
      }
      isOverwritten_ = true;
      reduceSources(reduction_, data_.data(), sources, data_.size() / dtypeSize(reduction_.dtype));
    }
    return op.commit(Operation::When::kAllBegan);
  }
  // Stamps that go while we reduce refuse the commit. What we gave still stands in our slot.
  void rollBack(Operation& op, Then) override {
    if (isOverwritten_) std::memcpy(data_.data(), op.payload(), data_.size());
    isOverwritten_ = false;
  }

 private:
  const Span data_;
  const Reduction reduction_;
  const int root_;  // -1: all take the result
  bool isOverwritten_ = false;
};

// The share of the part-th of `parts` ranks: cache lines, so that no two ranks write to the same
// one.
Span segmentOf(size_t part, size_t parts, Span data) {
  constexpr size_t kLine = 64;
  const size_t lines = (data.size() + kLine - 1) / kLine;
  const size_t start = std::min(lines * part / parts * kLine, data.size());
  const size_t end = std::min(lines * (part + 1) / parts * kLine, data.size());
  return data.subspan(start, end - start);
}

// The data as it was.
class Undo {
 public:
  explicit Undo(Span data) : data_(data) {}

  Status take(Group& group) {
    auto room = group.undo(data_.size());
    if (!room.ok()) return room.error();
    copyPastCache(*room, data_);
    copy_ = *room;
    return {};
  }
  // False: there is no copy.
  bool putBack() {
    if (!copy_) return false;
    std::memcpy(data_.data(), copy_, data_.size());
    copy_ = nullptr;
    return true;
  }

 private:
  const Span data_;
  const std::byte* copy_ = nullptr;
};

class Large final : public Algorithm {
 public:
  Large(Span data, Reduction reduction, int root)
      : data_(data), reduction_(reduction), root_(root), undo_(data) {}

  Status contribute(Operation& op) override {
    if (isSpoilt_) return spoilt();
    Group& group = op.group();
    auto region = group.engine().regions().add(data_.data(), data_.size(), kRemoteRead);
    if (!region.ok()) return region.error();
    input_ = std::move(*region);
    op.announceInput(input_.remote());
    MOONCAKE_TRY(op.begin(0));
    MOONCAKE_TRY(op.awaitAllBegun());
    if (root_ >= 0 && !op.takesPart(root_)) return op.agreeRootLost(root_);

    // Over messages every rank waits in commitDone() until its share has been fetched: the share
    // may lie in the data. In memory it must outlive the operation.
    const bool mapped = group.window().fullyMapped();
    isWithinTheData_ = !mapped && root_ < 0;
    const Span mine = segment(op, op.rank());
    share_ = mine;
    RemoteRegion result = input_.remote();
    if (!isWithinTheData_) {
      auto block = group.shared(std::max<size_t>(mine.size(), 1));
      if (!block.ok()) return block.error();
      share_ = {block->data, mine.size()};
      result = block->region;
    }
    MOONCAKE_TRY(reduceSegment(op, reduction_, mine, size_t(mine.data() - data_.data()), share_,
                               [&]() -> Status {
                                 // The copy costs nothing while the first fetches are on their way.
                                 return takesResult(op) && !mapped ? undo_.take(group) : Status();
                               }));
    return op.publishReady(result);
  }

  Status conclude(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllReady());
    // Everybody is through with the inputs, and ours is about to be written over: from here on
    // nobody may read it. (ThreadSanitizer, too, learns here that they have read it: it cannot
    // follow stamps, which peers in this process reach under another address.)
    if (!isWithinTheData_) input_ = MemoryRegion();
    if (takesResult(op) && !hasResult_) MOONCAKE_TRY(takeResult(op));
    return op.group().window().fullyMapped() ? op.commit(Operation::When::kAllReady)
                                             : op.commitDone();
  }

  void rollBack(Operation&, Then) override {
    isSpoilt_ = (!undo_.putBack() && isOverwritten_) || isSpoilt_;
    isOverwritten_ = false;
    input_ = MemoryRegion();
    hasResult_ = false;
  }

  // Where all is mapped, `ready` of all is the commit, and the input is written over without a
  // copy: there is no way back when the commit is refused after all, because a rank took its memory
  // away before we had our result.
  bool isSpoilt() const { return isSpoilt_; }
  static Error spoilt() {
    return {ErrorCode::kInputsLost,
            "a rank went while its result was taken. Part of the data is reduced already: restore "
            "it before you call again"};
  }

 private:
  bool takesResult(Operation& op) const { return root_ < 0 || root_ == op.rank(); }

  Span segment(Operation& op, int rank) const {
    const auto& ranks = op.ranks();
    const auto part = std::ranges::lower_bound(ranks, rank) - ranks.begin();
    return segmentOf(size_t(part), ranks.size(), data_);
  }

  Status takeResult(Operation& op) {
    isOverwritten_ = true;
    Fetches fetches(op);
    for (const int from : op.others()) {
      const Span part = segment(op, from);
      const size_t offset = isWithinTheData_ ? size_t(part.data() - data_.data()) : 0;
      MOONCAKE_TRY(fetches.start(from, op.slot(from).result, offset, part));
    }
    MOONCAKE_TRY(fetches.await());
    failpoint("fetched");
    const Span mine = segment(op, op.rank());
    if (share_.data() != mine.data()) std::memcpy(mine.data(), share_.data(), mine.size());
    hasResult_ = true;
    return {};
  }

  const Span data_;
  const Reduction reduction_;
  const int root_;  // -1: all take the result
  MemoryRegion input_;
  Undo undo_;
  Span share_;  // where our segment is reduced
  bool isWithinTheData_ = false;
  bool hasResult_ = false;
  bool isOverwritten_ = false;
  bool isSpoilt_ = false;
};

// Of one piece of many. Every survivor comes to the same conclusion: the pieces' contributors are
// agreed.
Status checkPieces(Group& group, std::shared_ptr<const GroupView>& contributors, Status status) {
  const bool isFirst = !contributors;
  if (isFirst) contributors = group.lastView;
  const bool isLost = status.code() == ErrorCode::kPeerLost && !isFirst;
  if (!isLost && (!status.ok() || group.lastView->active == contributors->active)) return status;
  return {ErrorCode::kInputsLost,
          (status.ok() ? "a rank was lost between two pieces of " +
                             std::to_string(kUndoBytes >> 20) + " MiB of one operation"
                       : status.error().message) +
              ". Part of the data is reduced already: restore it before you call again"};
}

Status reduceTo(Group& group, Verb verb, Span data, Reduction reduction, int root,
                Deadline deadline) {
  MOONCAKE_TRY(checkReduction(reduction));
  std::shared_ptr<const GroupView> contributors;
  const bool isCut = data.size() > kUndoBytes;
  do {
    const Span piece = data.first(std::min(data.size(), kUndoBytes));
    Operation op(group,
                 {.verb = verb,
                  .dtype = reduction.dtype,
                  .reduce = reduction.kind,
                  .root = root,
                  .count = data.size() / dtypeSize(reduction.dtype)},
                 deadline);
    Status status;
    if (piece.size() <= group.eagerBytes()) {
      Small small(piece, reduction, root);
      status = op.run(small);
    } else {
      Large large(piece, reduction, root);
      status = op.run(large);
      if (large.isSpoilt() && status.code() == ErrorCode::kPeerLost) status = Large::spoilt();
    }
    if (isCut) MOONCAKE_TRY(checkPieces(group, contributors, std::move(status)));
    if (!isCut) MOONCAKE_TRY(std::move(status));
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
