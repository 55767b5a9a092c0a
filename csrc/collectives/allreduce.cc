// Small: one exchange of slots; every rank reduces all n contributions itself. n*s bytes read per
// rank, one round.
//
// Large: reduce-scatter and allgather by direct fetches (the two halves of Rabenseifner's
// algorithm, without its recursive halving: one step each, since every rank reaches every other at
// the same cost).
//   1. Rank r reduces segment r of all inputs into memory that its peers can reach, and publishes
//      `ready`.
//   2. Every rank fetches all segments. Until then the input can be restored, so an operation that
//      ends earlier can be run again among the survivors.
// 2s(n-1)/n bytes in and out of each rank. If part of the group is not mapped, the input is copied
// aside before it is overwritten. If network cards lead to that part, peers fetch from that copy
// and from a copy of the result, which the cards know. If the whole group is mapped, results
// outlive their ranks, so `ready` of all ranks is the commit.
//
// Several buffers (all_reduce coalesced) take the same steps as one: every rank has a segment of
// each.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/failpoint.h"
#include "collectives/buffers.h"
#include "collectives/collectives.h"
#include "collectives/fed_pieces.h"
#include "collectives/landed_fetch.h"
#include "collectives/segment_reduce.h"
#include "group/operation.h"

namespace mooncake {
namespace {

// Larger data is reduced piece by piece. A rank that is lost between two pieces leaves the data
// half reduced. 32 MiB covers DDP's buckets of 25 MiB.
constexpr size_t kUndoBytes = 32 << 20;

constexpr const char* kReducedPartly =
    "Part of the data is reduced already: restore it before you call again";

// The error of an operation that has changed its input. If the group is over, its code stays,
// because there is no call to repeat.
Error inputsLost(Group& group, const Error& why) {
  group.lostInputsOnly = why.code != ErrorCode::kPeerLost && why.code != ErrorCode::kInputsLost;
  const bool isOver = why.code == ErrorCode::kEvicted || why.code == ErrorCode::kMinority ||
                      why.code == ErrorCode::kAborted;
  return {isOver ? why.code : ErrorCode::kInputsLost, why.message + ". " + kReducedPartly};
}

// The peers' second-level caches, of 1 MiB or more, still hold most of such a share when it is
// written again.
constexpr size_t kCachedBytes = 256 << 10;

class AllreduceEager final : public Algorithm {
 public:
  AllreduceEager(Buffers buffers, ReduceKind kind, int root)
      : buffers_(buffers), kind_(kind), root_(root) {}

  Status publish(Operation& op) override {
    packForPeers(op, buffers_);
    return op.begin(packedBytes(buffers_));
  }
  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    if (root_ >= 0 && !op.takesPart(root_)) return op.agreeRootLost(root_);
    if (root_ < 0 || root_ == op.rank()) MOONCAKE_TRY(reduceBuffers(op));
    return op.commit();
  }
  // If a fence arrives while we reduce, the commit is refused. Our input still stands in our slot.
  void rollBack(Operation& op, Rollback) override {
    const std::byte* given = op.payload();
    for (const Buffer& buffer : buffers_) {
      if (isOverwritten_) std::memcpy(buffer.data.data(), given, buffer.data.size());
      given += aligned(buffer.data.size());
    }
    isOverwritten_ = false;
  }

 private:
  Status reduceBuffers(Operation& op) {
    const auto sources = op.group().sources().first(op.ranks().size());
    const size_t bytes = packedBytes(buffers_);
    // Our own data is nearer in the buffer than in the slot. The slot serves if we have reduced
    // into the buffer before, and for a list, because its buffers may overlap.
    const bool isHere = buffers_.size() == 1 && !isOverwritten_;
    size_t offset = 0;
    for (const Buffer& buffer : buffers_) {
      for (size_t i = 0; i < sources.size(); ++i) {
        auto payload = op.payloadOf(op.ranks()[i], bytes);
        if (!payload.ok()) return payload.error();
        const bool isOurs = op.ranks()[i] == op.rank();
        sources[i] = isOurs && isHere ? buffer.data.data() : *payload + offset;
      }
      isOverwritten_ = true;
      reduceSources({buffer.dtype, kind_}, buffer.data.data(), sources,
                    buffer.data.size() / dtypeSize(buffer.dtype));
      offset += aligned(buffer.data.size());
    }
    return {};
  }

  const Buffers buffers_;
  const ReduceKind kind_;
  const int root_;  // -1: all take the result
  bool isOverwritten_ = false;
};

// The segment of rank `part` of `parts`. It consists of whole cache lines, so that no two ranks
// write to the same line.
Span segmentOf(size_t part, size_t parts, Span data) {
  constexpr size_t kLine = 64;
  const size_t lines = (data.size() + kLine - 1) / kLine;
  const size_t start = std::min(lines * part / parts * kLine, data.size());
  const size_t end = std::min(lines * (part + 1) / parts * kLine, data.size());
  return data.subspan(start, end - start);
}

// A copy of the data as it was before the operation.
class Undo {
 public:
  explicit Undo(Buffers buffers) : buffers_(buffers) {
    size_t offset = 0;
    for (const Buffer& buffer : buffers) {
      offsets_.push_back(offset);
      offset += aligned(buffer.data.size());
    }
  }

  // Reserves room for the copies; no part is copied yet.
  Status reserve(Group& group) {
    auto room = group.undo(packedBytes(buffers_));
    if (!room.ok()) return room.error();
    room_ = *room;
    isTaken_ = false;
    return {};
  }
  // Copies a part of buffer `index`.
  void copy(size_t index, Span part) {
    copyPastCache(at(index) + (part.data() - buffers_[index].data.data()), part);
  }
  // All parts have been copied.
  void setTaken() { isTaken_ = true; }
  // The copies, for peers to read.
  std::vector<Buffer> buffers() const {
    std::vector<Buffer> copies(buffers_.begin(), buffers_.end());
    for (size_t i = 0; i < copies.size(); ++i) copies[i].data = {at(i), copies[i].data.size()};
    return copies;
  }
  // Restores the data. False: there is no complete copy.
  bool putBack() {
    if (!isTaken_) return false;
    for (size_t i = 0; i < buffers_.size(); ++i)
      std::memcpy(buffers_[i].data.data(), at(i), buffers_[i].data.size());
    isTaken_ = false;
    return true;
  }

 private:
  std::byte* at(size_t index) const { return room_ + offsets_[index]; }

  const Buffers buffers_;
  std::vector<size_t> offsets_;  // offsets of the copies in the room
  std::byte* room_ = nullptr;
  bool isTaken_ = false;
};

class AllreduceRendezvous final : public Algorithm {
 public:
  AllreduceRendezvous(Buffers buffers, ReduceKind kind, int root)
      : buffers_(buffers), kind_(kind), root_(root), undo_(buffers) {}

  Status publish(Operation& op) override {
    if (isSpoilt_) return spoilt();
    Group& group = op.group();
    const bool byCards = group.usesCards();
    if (byCards) {
      MOONCAKE_TRY(undo_.reserve(group));
      copyForOthers(op);
    }
    auto table = byCards ? announceBuffers(op, undo_.buffers(), inputs_)
                         : announceBuffers(op, buffers_, inputs_);
    if (!table.ok()) return table.error();
    MOONCAKE_TRY(op.begin(*table));
    MOONCAKE_TRY(op.awaitAllBegun());
    if (root_ >= 0 && !op.takesPart(root_)) return op.agreeRootLost(root_);

    // Over messages every rank waits in commitDone() until its share has been fetched, so the share
    // may lie in the data. In mapped memory the share must outlive the operation.
    const bool mapped = group.window().fullyMapped();
    isWithinTheData_ = !mapped && root_ < 0 && !byCards;
    RemoteRegion result;  // empty: the share lies in the data
    std::byte* share = nullptr;
    bool isInCaches = false;  // peers' caches hold the share's memory from the previous operation
    if (!isWithinTheData_) {
      const size_t bytes = shareBytes(op, op.rank());
      isInCaches = mapped && bytes <= kCachedBytes;
      auto block = group.shared(std::max<size_t>(bytes, 1));
      if (!block.ok()) return block.error();
      share = block->data;
      result = block->region;
    }
    segments_.clear();
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const Span mine = segment(op, op.rank(), i);
      segments_.push_back({.reduction = {buffers_[i].dtype, kind_},
                           .own = mine.data(),
                           .buffer = i,
                           .offset = size_t(mine.data() - buffers_[i].data.data()),
                           .target = share ? Span(share, mine.size()) : mine,
                           .isForPeers = isInCaches});
      if (share) share += aligned(mine.size());
    }
    MOONCAKE_TRY(reduceSegments(op, segments_, buffers_.size(), [&]() -> Status {
      // The copy costs nothing while the first fetches are on their way.
      if (!takesResult(op) || mapped) return {};
      if (!byCards) {
        MOONCAKE_TRY(undo_.reserve(group));
        copyForOthers(op);
      }
      for (size_t i = 0; i < buffers_.size(); ++i) undo_.copy(i, segment(op, op.rank(), i));
      undo_.setTaken();
      return {};
    }));
    return op.publishReady(result);
  }

  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllReady());
    // All ranks have read the inputs, and ours is about to be overwritten: from here on no peer may
    // read it. (This also tells ThreadSanitizer that they have read it: it cannot follow stamps,
    // which peers in this process reach under another address.)
    if (!isWithinTheData_) inputs_.clear();
    if (takesResult(op) && !hasResult_) MOONCAKE_TRY(takeResult(op));
    return op.group().window().fullyMapped() ? op.commit() : op.commitDone();
  }

  void rollBack(Operation&, Rollback) override {
    inputs_.clear();  // first: a peer may still be fetching the data that is restored
    isSpoilt_ = (!undo_.putBack() && isOverwritten_) || isSpoilt_;
    isOverwritten_ = false;
    hasResult_ = false;
  }

  // True if the input is lost. If the whole group is mapped, `ready` of all ranks is the commit,
  // and the input is overwritten without a copy. There is no way back if the commit is refused
  // after that: a rank revoked its memory before we had our result, or the deadline passed.
  bool isSpoilt() const { return isSpoilt_; }
  static Error spoilt() {
    return {ErrorCode::kInputsLost,
            "a rank was lost while its result was fetched. " + std::string(kReducedPartly)};
  }

 private:
  bool takesResult(Operation& op) const { return root_ < 0 || root_ == op.rank(); }

  Span segment(Operation& op, int rank, size_t buffer) const {
    const auto& ranks = op.ranks();
    const auto part = std::ranges::lower_bound(ranks, rank) - ranks.begin();
    return segmentOf(size_t(part), ranks.size(), buffers_[buffer].data);
  }

  // Bytes of the rank's segments, packed.
  size_t shareBytes(Operation& op, int rank) const {
    size_t bytes = 0;
    for (size_t i = 0; i < buffers_.size(); ++i) bytes += aligned(segment(op, rank, i).size());
    return bytes;
  }

  // Copies all but our own segments, which no peer fetches.
  void copyForOthers(Operation& op) {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const Span data = buffers_[i].data, own = segment(op, op.rank(), i);
      const auto before = size_t(own.data() - data.data());
      undo_.copy(i, data.first(before));
      undo_.copy(i, data.subspan(before + own.size()));
    }
  }

  Status takeResult(Operation& op) {
    isOverwritten_ = true;
    std::vector<Wanted> wanted;
    for (const int from : op.others()) {
      const bool isWithinItsData = op.slot(from).result.key == 0;
      size_t offset = 0;  // in the peer's share
      for (size_t i = 0; i < buffers_.size(); ++i) {
        const Span part = segment(op, from, i);
        RemoteRegion result = op.slot(from).result;
        if (isWithinItsData) {
          auto buffer = announcedBuffer(op, from, i, buffers_.size());
          if (!buffer.ok()) return buffer.error();
          result = *buffer;
        }
        const auto inData = size_t(part.data() - buffers_[i].data.data());
        wanted.push_back({from, result, isWithinItsData ? inData : offset, part});
        offset += aligned(part.size());
      }
    }
    MOONCAKE_TRY(fetchLanded(op, wanted, [&] {
      for (size_t i = 0; i < buffers_.size() && !isWithinTheData_; ++i) {
        const Span mine = segment(op, op.rank(), i);
        std::memcpy(mine.data(), segments_[i].target.data(), mine.size());
      }
    }));
    failpoint("fetched");
    hasResult_ = true;
    return {};
  }

  const Buffers buffers_;
  const ReduceKind kind_;
  const int root_;  // -1: all take the result
  std::vector<MemoryRegion> inputs_;
  Undo undo_;
  std::vector<Segment> segments_;  // the segments that this rank reduces
  bool isWithinTheData_ = false;
  bool hasResult_ = false;
  bool isOverwritten_ = false;
  bool isSpoilt_ = false;
};

// Turns the status of one piece into the status of the whole operation. Every survivor reaches the
// same conclusion, because all agree on the contributors and the errors of pieces.
Status checkPieces(Group& group, std::shared_ptr<const GroupView>& contributors, Status status) {
  const bool isFirst = !contributors;
  if (isFirst) contributors = group.lastView;
  if (isFirst || status.code() == ErrorCode::kInputsLost) return status;
  if (!status.ok()) return inputsLost(group, status.error());
  if (group.lastView->active == contributors->active) return status;
  return inputsLost(group, {ErrorCode::kInputsLost, "a rank was lost between two pieces of " +
                                                        std::to_string(kUndoBytes >> 20) +
                                                        " MiB of one operation"});
}

// Takes buffers off the front: at most `most`, and at most kUndoBytes in total.
std::vector<Buffer> takePiece(std::deque<Buffer>& buffers, size_t most) {
  std::vector<Buffer> piece;
  size_t room = kUndoBytes;
  while (!buffers.empty() && piece.size() < most) {
    Buffer& buffer = buffers.front();
    const size_t bytes =
        std::min(buffer.data.size(), room & ~size_t(63));  // never within an element
    piece.push_back({buffer.data.first(bytes), buffer.dtype});
    room -= bytes;
    buffer.data = buffer.data.subspan(bytes);
    if (!buffer.data.empty()) break;
    buffers.pop_front();
  }
  return piece;
}

Status reducePiece(Group& group, const Call& call, Buffers buffers, Deadline deadline) {
  Operation op(group, call, deadline);
  if (packedBytes(buffers) <= group.eagerBytes()) {
    AllreduceEager eager(buffers, call.reduce, call.root);
    return op.run(eager);
  }
  AllreduceRendezvous rendezvous(buffers, call.reduce, call.root);
  Status status = op.run(rendezvous);
  if (status.ok() || !rendezvous.isSpoilt() || status.code() == ErrorCode::kInputsLost)
    return status;
  return status.code() == ErrorCode::kPeerLost ? AllreduceRendezvous::spoilt()
                                               : inputsLost(group, status.error());
}

Status reduceFed(Group& group, const Call& call, const Buffer& all, InputFeed& feed,
                 Deadline deadline) {
  const size_t bytes = all.data.size();
  return runFed(group, call, feed, bytes, fedPieceBytes(bytes), OnLoss::kRestoreAndRunAgain,
                [&](const Call& each, size_t begin, size_t length) {
                  const Buffer piece{all.data.subspan(begin, length), all.dtype};
                  return reducePiece(group, each, Buffers(&piece, 1), deadline);
                });
}

Status reduceTo(Group& group, Verb verb, Buffers buffers, ReduceKind kind, int root,
                Deadline deadline, InputFeed* feed = nullptr) {
  for (const Buffer& buffer : buffers) MOONCAKE_TRY(checkReduction({buffer.dtype, kind}));
  group.lostInputsOnly = false;
  const Call call = callOf({.verb = verb, .reduce = kind, .root = root}, buffers);
  if (feed) return reduceFed(group, call, buffers[0], *feed, deadline);
  const size_t bytes = packedBytes(buffers), most = mostBuffers(group);
  if (bytes <= group.eagerBytes() || (bytes <= kUndoBytes && buffers.size() <= most))
    return reducePiece(group, call, buffers, deadline);
  std::shared_ptr<const GroupView> contributors;
  std::deque<Buffer> rest(buffers.begin(), buffers.end());
  while (!rest.empty()) {
    const std::vector<Buffer> piece = takePiece(rest, most);
    Call each = call;
    each.goesOn = !rest.empty();
    const Status status =
        checkPieces(group, contributors, reducePiece(group, each, piece, deadline));
    if (status.ok()) continue;
    group.renewal().callEnds();  // as on all ranks
    return status;
  }
  return {};
}

}  // namespace

Status allreduce(Group& group, Buffers buffers, ReduceKind kind, Deadline deadline) {
  return reduceTo(group, Verb::kAllreduce, buffers, kind, -1, deadline);
}

Status allreduce(Group& group, Span data, Reduction reduction, Deadline deadline, InputFeed* feed) {
  const Buffer buffer{data, reduction.dtype};
  return reduceTo(group, Verb::kAllreduce, Buffers(&buffer, 1), reduction.kind, -1, deadline, feed);
}

Status reduce(Group& group, Span data, Reduction reduction, int root, Deadline deadline,
              InputFeed* feed) {
  const Buffer buffer{data, reduction.dtype};
  return reduceTo(group, Verb::kReduce, Buffers(&buffer, 1), reduction.kind, root, deadline, feed);
}

}  // namespace mooncake
