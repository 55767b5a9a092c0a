// Eager (all that a rank sends fits its slot): one exchange of slots. Rendezvous: the slot
// announces one region per receiver, and every rank fetches its part from each, starting with its
// right neighbour. (n-1)s bytes in and out of each rank, one copy where the memory can be read.
// Each rank chooses one of the two for its own data.
//
// Payload:  sum sent, sum received | sends[n], receives[n] in bytes | for every other rank in order
// the data, or one region each when input.bytes > 0. The sums are hashes over (from, to, bytes).
// Over all ranks they are equal exactly when all splits fit pair by pair, so every rank learns of a
// misfit anywhere at the cost of two numbers.
//
// Mapped peers read this payload in place. Over messages the whole payload would go to every rank,
// n times the bytes that it needs: with 1024 ranks 42 MB from each. So a rank with long messages
// puts to every other rank only the part for that rank:
//
//           sum sent, sum received | sends[to], receives[to] | the data for it, or the region
//
// Only `to` receives that part, so no other rank can supply it if the sender dies half way. Such an
// operation ends when all have what they need (Operation::commitDone), as with regions. Short
// messages carry the whole payload, because that saves the second round.
//
// In pieces: the input of some rank comes while the operation runs. Such a rank publishes its splits
// without data, and the length of the pieces in which its input comes. So all ranks learn from the
// first operation that the call goes in pieces, and choose them alike. Each piece is an operation of
// its own, on the same place of all parts; shorter parts end earlier. Ranks with all of their data
// take part in that as they are.
//
// Input region of the slot:  address: length of the rank's longest part | bytes: 0, or the length of
// all parts if each has a region | key: 0, or the length of the rank's pieces.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/fed_pieces.h"
#include "group/fetches.h"
#include "group/operation.h"
#include "group/writes.h"

namespace mooncake {
namespace {

uint64_t mix(uint64_t from, uint64_t to, uint64_t bytes) {
  uint64_t x =
      (from << 32 | to) * 0x9e3779b97f4a7c15 + bytes * 0xbf58476d1ce4e5b9 + 0x94d049bb133111eb;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t wordAt(const std::byte* payload, size_t index) {
  uint64_t word;
  std::memcpy(&word, payload + 8 * index, sizeof(word));
  return word;
}
void setWord(std::byte* payload, size_t index, uint64_t word) {
  std::memcpy(payload + 8 * index, &word, sizeof(word));
}

constexpr size_t kSums = 2;                     // words
constexpr size_t kPartBytes = 8 * (kSums + 2);  // bytes before the data in a payload for one rank
size_t tableBytes(int size) { return 8 * (kSums + 2 * size_t(size)); }

// Reads a rank's payload, in either form.
class Published {
 public:
  Published(const Operation& op, int from)
      : op_(op), from_(from), slot_(op.slot(from)), isOurs_(op.isPayloadOurs(from)) {}

  bool isComplete() const { return slot_.payloadBytes >= headBytes(); }
  size_t headBytes() const { return isOurs_ ? kPartBytes : tableBytes(op_.size()); }
  uint64_t sumSent() const { return wordAt(slot_.payload, 0); }
  uint64_t sumReceived() const { return wordAt(slot_.payload, 1); }
  // nullopt: the payload for us does not hold this length.
  std::optional<uint64_t> sends(int to) const { return about(to, 0); }
  std::optional<uint64_t> receives(int from) const { return about(from, 1); }
  bool isRendezvous() const { return slot_.input.bytes > 0; }
  uint64_t longestPart() const { return slot_.input.address; }
  uint64_t pieceBytes() const { return slot_.input.key; }  // 0: all data is there
  // Offset of the data for us, or of its region.
  size_t begin() const {
    size_t at = headBytes();
    if (isOurs_) return at;
    for (int to = 0; to < op_.rank(); ++to) {
      if (to != from_) at += isRendezvous() ? sizeof(RemoteRegion) : *sends(to);
    }
    return at;
  }

 private:
  std::optional<uint64_t> about(int rank, size_t which) const {
    if (!isOurs_) return wordAt(slot_.payload, kSums + which * size_t(op_.size()) + size_t(rank));
    if (rank != op_.rank()) return std::nullopt;
    return wordAt(slot_.payload, kSums + which);
  }

  const Operation& op_;
  const int from_;
  const Slot& slot_;
  const bool isOurs_;
};

// The pieces of a call. The same on all ranks.
struct Pieces {
  uint64_t partBytes = 0;   // of the longest part of all ranks
  uint64_t pieceBytes = 0;  // of each part; 0: the call does not go in pieces
};

class Alltoall final : public Algorithm {
 public:
  // `isFed`: the input comes later, and this operation only settles the pieces.
  Alltoall(Group& group, std::span<const ConstSpan> inputs, std::span<const Span> outputs,
           bool isFed = false)
      : inputs_(inputs), outputs_(outputs), isFed_(isFed) {
    for (const ConstSpan input : inputs_) {
      total_ += input.size();
      longest_ = std::max(longest_, input.size());
    }
    const size_t own = inputs_[group.rank()].size(), table = tableBytes(group.size());
    // Rendezvous adds a wait until all have fetched. If that costs switches between ranks, a copy
    // through the slot is cheaper as long as it fits.
    const size_t inSlot = table + total_ - own;
    isEager_ = inSlot <= (group.isCrowded() ? group.slotBytes() : group.eagerBytes());
  }

  Status publish(Operation& op) override {
    writeTable(op);
    std::byte* cursor = op.payload() + tableBytes(op.size());
    op.announceInput({.address = longest_,
                      .bytes = hasRegions() ? total_ : 0,
                      .key = isFed_ ? splitPieceBytesOf(longest_, total_) : 0});
    for (int r = 0; r < op.size(); ++r) {
      if (r == op.rank()) continue;
      if (hasRegions()) {
        // Peers only read, but the table of regions takes no const addresses.
        auto region = op.group().engine().regions().add(const_cast<std::byte*>(inputs_[r].data()),
                                                        inputs_[r].size(), kRemoteRead);
        if (!region.ok()) return region.error();
        regions_.push_back(std::move(*region));
      }
      cursor += writeData(op, r, cursor);
    }
    const auto bytes = size_t(cursor - op.payload());
    if (bytes * op.unmapped() > op.group().eagerBytes()) {
      MOONCAKE_TRY(op.beginSplit(bytes, [&](int to, std::byte* payload) {
        std::memcpy(payload, op.payload(), 8 * kSums);
        setWord(payload, kSums, inputs_[to].size());
        setWord(payload, kSums + 1, outputs_[to].size());
        return kPartBytes + writeData(op, to, payload + kPartBytes);
      }));
    } else {
      MOONCAKE_TRY(op.begin(bytes));
    }
    MOONCAKE_TRY(op.awaitAllBegun());
    endsTogether_ = std::ranges::any_of(
        op.ranks(), [&](int r) { return Published(op, r).isRendezvous() || op.isSplit(r); });
    return endsTogether_ ? settle(op) : Status();
  }

  Status complete(Operation& op) override {
    if (endsTogether_) return op.commitDone();
    MOONCAKE_TRY(op.awaitAllBegun());
    MOONCAKE_TRY(settle(op));
    return op.commit();
  }

  void rollBack(Operation&, Rollback) override {
    regions_.clear();
    endsTogether_ = false;
  }

  const Pieces& pieces() const { return pieces_; }

 private:
  bool hasRegions() const { return !isEager_ && !isFed_; }

  void writeTable(Operation& op) const {
    uint64_t sent = 0, received = 0;
    for (int r = 0; r < op.size(); ++r) {
      setWord(op.payload(), kSums + size_t(r), inputs_[r].size());
      setWord(op.payload(), kSums + size_t(op.size() + r), outputs_[r].size());
      if (!op.takesPart(r)) continue;
      sent += mix(op.rank(), r, inputs_[r].size());
      received += mix(r, op.rank(), outputs_[r].size());
    }
    setWord(op.payload(), 0, sent);
    setWord(op.payload(), 1, received);
  }

  // Writes the data for rank `to`, or its region. Returns the length.
  size_t writeData(const Operation& op, int to, std::byte* payload) const {
    if (isFed_) return 0;
    if (!isEager_) {
      const RemoteRegion remote = regions_[size_t(to < op.rank() ? to : to - 1)].remote();
      std::memcpy(payload, &remote, sizeof(remote));
      return sizeof(remote);
    }
    const ConstSpan input = inputs_[to];
    op.write(payload, input);
    return input.size();
  }

  Status settle(Operation& op) {
    MOONCAKE_TRY(checkSplits(op));
    pieces_ = piecesOf(op);
    return pieces_.pieceBytes ? Status() : take(op);
  }

  // At most eight, also if ranks without a feed have longer parts.
  static Pieces piecesOf(const Operation& op) {
    Pieces pieces;
    for (const int r : op.ranks()) {
      const Published theirs(op, r);
      pieces.partBytes = std::max(pieces.partBytes, theirs.longestPart());
      pieces.pieceBytes = std::max(pieces.pieceBytes, theirs.pieceBytes());
    }
    if (pieces.pieceBytes) {
      const size_t least = splitPieceBytes(pieces.partBytes, kMostSplitPieces);
      pieces.pieceBytes = std::max(pieces.pieceBytes, least);
    }
    return pieces;
  }

  Status checkSplits(Operation& op) const {
    uint64_t sent = 0, received = 0;
    for (const int r : op.ranks()) {
      const Published theirs(op, r);
      if (!theirs.isComplete()) return op.payloadOf(r, theirs.headBytes()).status();
      sent += theirs.sumSent();
      received += theirs.sumReceived();
    }
    if (sent == received) return {};
    std::string misfits;
    for (const int from : op.ranks()) {
      for (const int to : op.ranks()) {
        const auto out = Published(op, from).sends(to), in = Published(op, to).receives(from);
        if (!out || !in || *out == *in || misfits.size() > 500) continue;
        misfits += (misfits.empty() ? "" : "; ") + op.group().nameRank(from) + " sends " +
                   std::to_string(*out) + " bytes to " + op.group().nameRank(to) +
                   ", which expects " + std::to_string(*in);
      }
    }
    if (misfits.empty()) misfits = "between other ranks; their errors give the lengths";
    return op.agree(
        {ErrorCode::kMismatch, "the splits do not fit: " + misfits + ". Nothing was changed"});
  }

  Status take(Operation& op) const {
    const int rank = op.rank();
    if (!inputs_[rank].empty())
      std::memmove(outputs_[rank].data(), inputs_[rank].data(), inputs_[rank].size());
    Fetches fetches(op);
    for (const int from : op.others()) {
      const Published theirs(op, from);
      const Slot& slot = op.slot(from);
      const size_t at = theirs.begin();
      const size_t length = theirs.isRendezvous() ? sizeof(RemoteRegion) : outputs_[from].size();
      if (at > slot.payloadBytes || length > slot.payloadBytes - at)
        return op.payloadOf(from, at + length).status();
      if (theirs.isRendezvous()) {
        RemoteRegion region;
        std::memcpy(&region, slot.payload + at, sizeof(region));
        MOONCAKE_TRY(fetches.start(from, region, 0, outputs_[from]));
      } else if (length) {
        std::memcpy(outputs_[from].data(), slot.payload + at, length);
      }
    }
    MOONCAKE_TRY(fetches.await());
    zeroMissing(op, outputs_);
    return {};
  }

  const std::span<const ConstSpan> inputs_;
  const std::span<const Span> outputs_;
  const bool isFed_;
  size_t total_ = 0;
  size_t longest_ = 0;
  Pieces pieces_;
  bool isEager_ = false;
  bool endsTogether_ = false;  // some data is fetched, or was put to one rank only
  std::vector<MemoryRegion> regions_;
};

// The feed of a rank that has all of its data.
class WholeInput final : public InputFeed {
 public:
  Status await(size_t) override { return {}; }
  Status restart() override { return {}; }
};

}  // namespace

Status alltoall(Group& group, std::span<const ConstSpan> given, std::span<const Span> taken,
                DType dtype, Deadline deadline, InputFeed* feed) {
  std::vector<ConstSpan> inputs(given.begin(), given.end());
  std::vector<Span> outputs(taken.begin(), taken.end());
  inputs.resize(size_t(group.size()));
  outputs.resize(size_t(group.size()));
  // Whether pieces follow is known when all have begun.
  const Call call{.verb = Verb::kAlltoall, .dtype = dtype, .goesOn = 1};
  Alltoall whole(group, inputs, outputs, feed != nullptr);
  MOONCAKE_TRY(Operation(group, call, deadline).run(whole));
  const auto [partBytes, pieceBytes] = whole.pieces();
  if (pieceBytes == 0) {
    group.renewal().callEnds();
    return {};
  }
  WholeInput allThere;
  return runFed(group, call, feed ? *feed : allThere, partBytes, pieceBytes, OnLoss::kRunAgain,
                [&](const Call& each, size_t begin, size_t bytes) {
                  const auto from = pieceOf(std::span<const ConstSpan>(inputs), begin, bytes);
                  const auto to = pieceOf(std::span<const Span>(outputs), begin, bytes);
                  Alltoall piece(group, from, to);
                  return Operation(group, each, deadline).run(piece);
                });
}

}  // namespace mooncake
