// Each rank puts the rows that its experts made into memory that the ranks of its host map, and
// publishes which rows are for which rank. Then each rank adds up the rows of its tokens, in top-k
// order, so that the sum has the same bits in any order of arrival. Cost: one copy of each row that
// does not stand there already, k rows read for each token, one exchange of slots. Over messages
// each row crosses once, rows of the first tokens first, and a second exchange says that all ranks
// have their rows. Over messages rows are fetched from the caller's memory, unless cards fetch
// them: cards would have to register that memory first, which costs more than the copy.
#include <algorithm>
#include <cstring>
#include <deque>

#include "base/failpoint.h"
#include "ep/calls.h"
#include "ep/participants.h"
#include "group/fetches.h"
#include "group/operation.h"
#include "group/writes.h"

namespace mooncake::ep {
namespace {

class Combine final : public Algorithm {
 public:
  Combine(const Memory& memory, CombineCall& call, Ending& ending)
      : memory_(memory),
        call_(call),
        ending_(ending),
        handle_(*call.handle),
        shape_(handle_.shape),
        experts_(*handle_.experts),
        extrasAt_(combineRowBytes(shape_.hidden)),
        rowBytes_(normalCombineRowBytes(shape_.hidden, call.extras)),
        perExpert_(size_t(shape_.numRanks) * shape_.maxTokens) {}

  Status publish(Operation& op) override {
    MOONCAKE_TRY(call_.inputs);
    MOONCAKE_TRY(announceRows(op));
    stage(op);
    CombineTable table{.dispatch = handle_.number,
                       .arenaOffset = memory_.block.offset + memory_.layout.send(op.number()),
                       .regionOffset = areBare_ ? 0 : memory_.layout.send(op.number()),
                       .regionRowBytes = uint32_t(areBare_ ? call_.rowStride : rowBytes_),
                       .localExperts = uint32_t(experts_.numLocal(op.rank())),
                       .mask = call_.mask,
                       .ranges = handle_.ranges};
    const Bytes bytes = table.encode();
    std::ranges::copy(bytes, op.payload());
    if (op.unmapped() == 0) {
      MOONCAKE_TRY(op.begin(bytes.size()));
    } else {
      MOONCAKE_TRY(op.beginSplit(bytes.size() + mostPutBytes(op), [&](int to, std::byte* payload) {
        return putFor(op, to, bytes, payload);
      }));
    }
    if (op.group().window().fullyMapped()) return {};
    return take(op);
  }

  Status complete(Operation& op) override {
    if (!op.group().window().fullyMapped()) return op.commitDone();
    MOONCAKE_TRY(take(op));
    return op.commit();
  }

  void rollBack(Operation&, Rollback) override { region_ = {}; }

  // Writes the results of an operation that the other ranks ran without us.
  Status endSkipped(const Operation& op) {
    for (const int r : op.ranks()) ending_.participants.add(r);
    ending_.participants &= call_.mask & handle_.participants;
    rows_.assign(size_t(shape_.numExperts), {});
    return addUp(op, false, 0, 1);
  }

 private:
  // ---- sending

  // Calls visit(row) for each row that came from the rank, in the order in which they are packed.
  template <typename Visit>
  void forRowsOf(int rank, Visit visit) const {
    for (size_t e = 0; e < experts_.numLocal(memory_.group.rank()); ++e) {
      const auto& range = handle_.ranges[e * size_t(shape_.numRanks) + size_t(rank)];
      for (size_t i = 0; i < range.count; ++i) visit(e * perExpert_ + range.begin + i);
    }
  }

  // The place in x of a row that came from the rank.
  size_t inX(int rank, size_t row) const {
    if (call_.firstRows.empty()) return row;
    return call_.firstRows[size_t(rank)] + (row - handle_.ranges[size_t(rank)].begin);
  }

  // Announces the memory from which ranks that do not map us fetch.
  Status announceRows(Operation& op) {
    areBare_ = op.unmapped() > 0 && !call_.isInPlace && !call_.usesLogfmt && call_.extras == 0 &&
               call_.firstRows.empty() && !memory_.group.usesCards();
    op.announceInput(memory_.block.region);
    if (!areBare_) return {};
    const size_t rows = call_.rows.value_or(experts_.numLocal(op.rank()) * perExpert_);
    auto region = memory_.group.engine().regions().add(const_cast<std::byte*>(call_.x),
                                                       rows * call_.rowStride, kRemoteRead);
    if (!region.ok()) return region.error();
    region_ = std::move(*region);
    op.announceInput(region_.remote());
    return {};
  }

  void stage(const Operation& op) const {
    if (call_.isInPlace) return;
    std::byte* const staging = memory_.send(op.number());
    size_t rows = 0;
    for (const auto& range : handle_.ranges) rows += range.count;
    const CopyHint hint = stagingHint(op, rows * bf16Bytes(shape_.hidden));
    for (const int r : op.ranks()) {
      if (r == op.rank() && !call_.usesLogfmt) continue;  // own rows are read in place
      if (areBare_ && !memory_.group.window().peerPtr(r)) continue;
      forRowsOf(r, [&](size_t row) {
        const std::byte* from = call_.x + inX(r, row) * call_.rowStride;
        std::byte* to = staging + row * rowBytes_;
        if (call_.usesLogfmt) {
          encodeLogfmtRow(reinterpret_cast<const uint16_t*>(from), shape_.hidden, to);
        } else {
          copyRow(to, from, bf16Bytes(shape_.hidden), hint);
        }
        if (call_.extras > 0)
          std::memcpy(to + extrasAt_, call_.extrasOfRows + inX(r, row) * call_.extras,
                      extraBytes());
      });
    }
  }

  size_t bytesFor(int rank) const {
    size_t rows = 0;
    for (size_t e = 0; e < experts_.numLocal(memory_.group.rank()); ++e)
      rows += handle_.ranges[e * size_t(shape_.numRanks) + size_t(rank)].count;
    return rows * rowBytes_;
  }
  size_t mostPutBytes(const Operation& op) const {
    size_t most = 0;
    for (const int r : op.others()) {
      const size_t bytes = bytesFor(r);
      if (!op.group().window().peerPtr(r) && bytes <= mostInlineBytes(memory_.group))
        most = std::max(most, bytes);
    }
    return most;
  }
  // Writes the payload for rank `to`: the encoded table, which has the rows in staging, and the
  // rows if they are few. Returns its length.
  size_t putFor(const Operation& op, int to, ByteView table, std::byte* payload) const {
    const size_t bytes = bytesFor(to);
    std::byte* at = std::ranges::copy(table, payload).out;
    if (bytes > mostInlineBytes(memory_.group)) return table.size();
    CombineTable::setRowsAt({payload, table.size()}, RowsAt::kPayload);
    const std::byte* from = areBare_ ? call_.x : memory_.send(op.number());
    const size_t stride = areBare_ ? call_.rowStride : rowBytes_;
    forRowsOf(to, [&](size_t row) {
      std::memcpy(at, from + row * stride, stride);
      at += rowBytes_;
    });
    return table.size() + bytes;
  }

  // ---- receiving

  // The rows of an expert for this rank. `begin` is null if the owner of the expert takes no part.
  struct Rows {
    const std::byte* begin = nullptr;
    size_t stride = 0;
    const std::byte* extras = nullptr;  // of the first row
    size_t extraStride = 0;
    uint32_t count = 0;
    uint32_t used = 0;
  };

  Status take(Operation& op) {
    failpoint("ep-take");
    MOONCAKE_TRY(awaitBegun(op, call_.waits));
    std::vector<std::pair<int, CombineTable>> tables;
    GroupRanks participants;
    for (const int r : op.ranks()) {
      auto table = CombineTable::of(
          op, r, shape_, experts_.numLocal(r), rowBytes_,
          call_.usesLogfmt || call_.extras > 0 ? rowBytes_ : bf16Bytes(shape_.hidden));
      if (!table.ok()) return table.error();
      if (table->dispatch != handle_.number) {
        return op.agree({ErrorCode::kMismatch,
                         op.group().nameRank(r) + " combines the rows of dispatch #" +
                             std::to_string(table->dispatch) + ", this rank those of #" +
                             std::to_string(handle_.number) +
                             ": all ranks must combine with the handles of the same dispatch"});
      }
      participants.add(r);
      tables.emplace_back(r, std::move(*table));
    }
    for (const auto& [r, table] : tables) participants &= table.mask;
    participants &= handle_.participants;
    std::deque<Fetches> fetches;
    MOONCAKE_TRY(findRows(op, tables, participants, fetches));
    const size_t parts = std::max<size_t>(fetches.size(), 1);
    for (size_t part = 0; part < parts; ++part) {
      if (part < fetches.size()) MOONCAKE_TRY(fetches[part].await());
      MOONCAKE_TRY(addUp(op, participants.contains(op.rank()), part, parts));
    }
    ending_.participants = std::move(participants);
    return {};
  }

  // Finds the rows for this rank, and starts the fetches. They come in parts, each with the rows of
  // equally many tokens: one part is added up while the next ones arrive.
  Status findRows(Operation& op, const std::vector<std::pair<int, CombineTable>>& tables,
                  const GroupRanks& participants, std::deque<Fetches>& fetches) {
    rows_.assign(size_t(shape_.numExperts), {});
    if (!participants.contains(op.rank())) return {};
    size_t landingBytes = 0, senders = 0;  // senders: experts with rows to fetch
    const auto isFetched = [&](int r, const CombineTable& table) {
      return op.isPayloadOurs(r) && table.rowsAt == RowsAt::kStaging;
    };
    for (const auto& [r, table] : tables) {
      if (!participants.contains(r) || !isFetched(r, table)) continue;
      landingBytes += rowsIn(table, op.rank()) * table.regionRowBytes;
      senders += table.localExperts;
    }
    auto landing = op.group().scratch(landingBytes);
    if (!landing.ok()) return landing.error();
    std::byte* at = *landing;
    std::vector<Fetched> fetched;
    for (const auto& [r, table] : tables) {
      if (!participants.contains(r)) continue;
      const std::byte* packed = table.payloadRows;
      for (const int e : experts_.expertsOf(r)) {
        const size_t local = size_t(experts_.local(e));
        const auto& range = table.ranges[local * size_t(shape_.numRanks) + size_t(op.rank())];
        const size_t first = local * perExpert_ + range.begin, bytes = range.count * rowBytes_;
        const size_t ownFirst = inX(op.rank(), first);  // if these rows are our own
        Rows& rows = rows_[size_t(e)];
        rows.count = range.count;
        rows.stride = rowBytes_;
        if (r == op.rank() && !call_.usesLogfmt) {
          rows.stride = call_.rowStride;
          rows.begin = call_.x + ownFirst * rows.stride;
        } else if (isFetched(r, table)) {
          rows.stride = table.regionRowBytes;
          const std::span target(at, range.count * rows.stride);
          fetched.push_back({e, r, table.regionOffset + first * rows.stride, rows.stride, target});
          rows.begin = at;
          at += target.size();
        } else if (op.isPayloadOurs(r)) {
          rows.begin = packed;
          packed += bytes;
        } else {
          const uint64_t offset = table.arenaOffset + first * rowBytes_;
          rows.begin = op.group().window().peerArena(r, offset, bytes);
          if (!rows.begin) return nonsense(op, r, "announced rows outside of its memory");
        }
        const bool areOwn = r == op.rank();
        rows.extras =
            areOwn
                ? reinterpret_cast<const std::byte*>(call_.extrasOfRows + ownFirst * call_.extras)
                : rows.begin + extrasAt_;
        rows.extraStride = areOwn ? extraBytes() : rows.stride;
      }
    }
    if (fetched.empty()) return {};
    const size_t most = std::min(kMostParts, std::max<size_t>(tokens(), 1));
    const size_t parts = std::clamp<size_t>(landingBytes / (senders * kLeastFetchBytes), 1, most);
    for (size_t part = 0; part < parts; ++part) {
      const auto counts = rowsFor(tokensOf(part, parts));
      fetches.emplace_back(op);
      std::vector<Fetches::Piece> pieces;
      for (size_t i = 0; i < fetched.size(); ++i) {
        Fetched& one = fetched[i];
        const size_t rows = counts[size_t(one.expert)];
        const auto some = one.target.first(std::min(rows * one.rowBytes, one.target.size()));
        pieces.push_back({one.offset, some});
        one.offset += some.size();
        one.target = one.target.subspan(some.size());
        if (i + 1 < fetched.size() && fetched[i + 1].rank == one.rank) continue;
        MOONCAKE_TRY(fetches.back().start(one.rank, op.slot(one.rank).input, pieces));
        pieces.clear();
      }
    }
    return {};
  }

  struct Fetched {
    int expert, rank;
    uint64_t offset;  // of the rows that are not requested yet
    size_t rowBytes;
    std::span<std::byte> target;
  };
  static constexpr size_t kMostParts = 8;
  static constexpr size_t kLeastFetchBytes = size_t(32) << 10;  // per expert and part, roughly

  size_t tokens() const { return handle_.topk ? handle_.chosen.size() / handle_.topk : 0; }
  struct TokenRange {
    size_t begin, end;
  };
  TokenRange tokensOf(size_t part, size_t parts) const {
    return {tokens() * part / parts, tokens() * (part + 1) / parts};
  }

  // By expert: the number of rows that these tokens sent to it.
  std::vector<size_t> rowsFor(TokenRange some) const {
    std::vector<size_t> counts(size_t(shape_.numExperts));
    const auto places =
        std::span(handle_.chosen)
            .subspan(some.begin * handle_.topk, (some.end - some.begin) * handle_.topk);
    for (const int32_t expert : places) {
      if (expert != kNoExpert) ++counts[size_t(expert)];
    }
    return counts;
  }

  static size_t rowsIn(const CombineTable& table, int rank) {
    const size_t ranks = table.localExperts ? table.ranges.size() / table.localExperts : 0;
    size_t rows = 0;
    for (size_t e = 0; e < table.localExperts; ++e)
      rows += table.ranges[e * ranks + size_t(rank)].count;
    return rows;
  }

  Status nonsense(const Operation& op, int rank, const std::string& why) const {
    MOONCAKE_TRY(op.unlessFenced());
    return {ErrorCode::kProtocol,
            op.group().nameRank(rank) + " " + why + ": do all ranks run the same version?"};
  }

  // Adds up the rows of one part. The rows of an expert belong to the tokens that chose it, in
  // token order, so each part continues where the one before it ended.
  Status addUp(const Operation& op, bool takesPart, size_t part, size_t parts) {
    const size_t topk = handle_.topk;
    const auto [begin, end] = tokensOf(part, parts);
    std::vector<WeightedRow> summands;
    for (size_t t = begin; t < end; ++t) {
      summands.clear();
      for (const uint16_t* bias : call_.biases) summands.push_back({bias + t * shape_.hidden, 1});
      float* const extraSums = call_.extraSums + t * call_.extras;
      std::fill_n(extraSums, call_.extras, 0.0f);
      bool isMissing = false;
      float wanted = 0, arrived = 0;
      for (size_t j = 0; j < topk; ++j) {
        const size_t place = t * topk + j;
        const int32_t sent = handle_.chosen[place];
        if (sent == kNoExpert) continue;
        const bool isWanted = call_.chosen[place] != kNoExpert;
        if (isWanted) wanted += call_.weights[place];
        Rows& rows = rows_[size_t(sent)];
        if (!takesPart || !rows.begin) {
          isMissing |= isWanted;
          continue;
        }
        if (rows.used == rows.count)
          return nonsense(op, experts_.owner(sent), "gives fewer rows than it was sent");
        const size_t index = rows.used++;
        if (!isWanted) continue;
        arrived += call_.weights[place];
        summands.push_back({rows.begin + index * rows.stride, call_.weights[place]});
        addExtras(rows.extras + index * rows.extraStride, extraSums);
      }
      if (isMissing && call_.renormalizes && arrived != 0) {
        for (WeightedRow& summand : std::span(summands).subspan(call_.biases.size()))
          summand.weight *= wanted / arrived;
      }
      uint16_t* const out = call_.combined + t * shape_.hidden;
      if (call_.usesLogfmt) {
        combineLogfmtRows(summands, shape_.hidden, out);
      } else {
        combineRows(summands, shape_.hidden, out);
      }
      call_.missing[t] = isMissing;
    }
    return {};
  }

  size_t extraBytes() const { return call_.extras * sizeof(float); }
  void addExtras(const std::byte* from, float* sums) const {
    for (size_t i = 0; i < call_.extras; ++i) {
      float value;
      std::memcpy(&value, from + i * sizeof(value), sizeof(value));
      sums[i] += value;
    }
  }

  const Memory& memory_;
  CombineCall& call_;
  Ending& ending_;
  const Handle& handle_;
  const Shape& shape_;
  const ExpertMap& experts_;
  const size_t extrasAt_;  // offset of the further numbers in a row
  const size_t rowBytes_;
  const size_t perExpert_;
  std::vector<Rows> rows_;  // by expert
  // True if other ranks fetch the caller's own rows in this attempt.
  bool areBare_ = false;
  MemoryRegion region_;
};

}  // namespace

Status combine(const Memory& memory, CombineCall& call, Ending& ending) {
  const Handle& handle = *call.handle;
  if (!handle.isDone.load(std::memory_order_acquire)) {
    return {
        ErrorCode::kInvalidArgument,
        "combine: the dispatch of this handle did not end well, so there is nothing to combine"};
  }
  if (call.isInPlace && memory.group.lastNumber + 1 != call.expectedNumber) {
    return {ErrorCode::kInvalidArgument,
            "combine: the buffer that the rows were written to belongs to another operation: call "
            "combine before anything else is called on this buffer"};
  }
  const Call what{
      .verb = Verb::kCombine,
      .dtype = DType::kBFloat16,
      .goesOn = call.goesOn && !call.patience,
      .root = handle.shape.numExperts,
      .count = handle.shape.hidden,
      .tensors = uint32_t(handle.shape.maxTokens),
      .lengths = handle.experts->hash() + (call.usesLogfmt ? 1 : 0) + 2 * uint32_t(call.extras)};
  Combine combine(memory, call, ending);
  Operation op(memory.group, what, call.deadline);
  if (call.patience) op.skipAfter(*call.patience);
  MOONCAKE_TRY(op.run(combine));
  return op.wasSkipped() ? combine.endSkipped(op) : Status();
}

}  // namespace mooncake::ep
