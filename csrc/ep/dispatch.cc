// Every rank casts its rows once, into memory that the ranks of its host map, and publishes who
// chose which expert. Then each takes the rows for its experts: from the mapping; from another host
// out of the slot where they are few, else by one fetch. Cost: n rows written once, a row read for
// each (token, expert), one exchange of slots; over messages a token goes once to each rank, and a
// second exchange says that all have what they need.
//
// The order of the rows of an expert is (rank, token, place in top-k), whatever came first.
#include <algorithm>
#include <cstring>

#include "base/failpoint.h"
#include "ep/calls.h"
#include "ep/participants.h"
#include "group/operation.h"

namespace mooncake::ep {
namespace {

class Dispatch final : public Algorithm {
 public:
  Dispatch(const Memory& memory, DispatchCall& call, Ending& ending)
      : memory_(memory),
        call_(call),
        ending_(ending),
        handle_(*call.handle),
        shape_(handle_.shape),
        experts_(*handle_.experts),
        rowBytes_(dispatchRowBytes(shape_.hidden, call.format)) {}

  Status publish(Operation& op) override {
    stage(op);
    DispatchTable table{.tokens = uint32_t(handle_.tokens),
                        .topk = uint32_t(handle_.topk),
                        .arenaOffset = memory_.block.offset + memory_.layout.send(op.number()),
                        .mask = call_.mask,
                        .experts = handle_.chosen};
    op.announceInput(memory_.block.region);
    const Bytes bytes = table.encode(shape_.numExperts);
    std::ranges::copy(bytes, op.payload());
    if (op.unmapped() == 0) {
      MOONCAKE_TRY(op.begin(bytes.size()));
    } else {
      MOONCAKE_TRY(op.beginSplit(mostPutBytes_ + bytes.size(), [&](int to, std::byte* payload) {
        return putFor(op, to, table, payload);
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

  // The others did it without us.
  void endSkipped(const Operation& op) {
    next_.assign(experts_.numLocal(op.rank()), 0);
    ranges_.assign(next_.size() * size_t(op.size()), {});
    RankSet participants;
    for (const int r : op.ranks()) participants.add(r);
    writeHandle(op, participants & call_.mask);
  }

 private:
  // ---- giving

  // The rows for one rank that does not map us.
  struct Packed {
    std::vector<uint32_t> tokens;
    size_t offset = 0;  // in the send memory; only of those that do not go with the table
  };

  void stage(const Operation& op) {
    std::byte* const staging = memory_.send(op.number());
    for (size_t t = 0; t < handle_.tokens; ++t) {
      if (isChosen(t)) writeRow(t, staging + t * rowBytes_);
    }
    packed_.assign(size_t(op.size()), {});
    mostPutBytes_ = 0;
    if (op.unmapped() == 0) return;
    for (size_t t = 0; t < handle_.tokens; ++t) {
      for (const int32_t expert : chosenBy(t)) {
        if (expert == kNoExpert) continue;
        auto& tokens = packed_[size_t(experts_.owner(expert))].tokens;
        if (tokens.empty() || tokens.back() != t) tokens.push_back(uint32_t(t));
      }
    }
    size_t offset = handle_.tokens * rowBytes_;
    for (const int r : op.others()) {
      Packed& packed = packed_[size_t(r)];
      const size_t bytes = packed.tokens.size() * rowBytes_;
      if (op.group().window().peerPtr(r)) continue;
      if (bytes <= mostInlineBytes(memory_.group)) {
        mostPutBytes_ = std::max(mostPutBytes_, bytes);
        continue;
      }
      packed.offset = offset;
      for (const uint32_t t : packed.tokens) {
        std::memcpy(staging + offset, staging + t * rowBytes_, rowBytes_);
        offset += rowBytes_;
      }
    }
  }

  size_t putFor(const Operation& op, int to, DispatchTable table, std::byte* payload) const {
    const Packed& packed = packed_[size_t(to)];
    const size_t bytes = packed.tokens.size() * rowBytes_;
    table.rowsAt = bytes <= mostInlineBytes(memory_.group) ? RowsAt::kPayload : RowsAt::kStaging;
    table.packedRows = uint32_t(packed.tokens.size());
    table.packedOffset = memory_.layout.send(op.number()) + packed.offset;
    const Bytes encoded = table.encode(shape_.numExperts);
    std::byte* at = std::ranges::copy(encoded, payload).out;
    if (table.rowsAt == RowsAt::kStaging) return encoded.size();
    for (const uint32_t t : packed.tokens) {
      std::memcpy(at, memory_.send(op.number()) + t * rowBytes_, rowBytes_);
      at += rowBytes_;
    }
    return encoded.size() + bytes;
  }

  std::span<const int32_t> chosenBy(size_t token) const {
    return std::span(handle_.chosen).subspan(token * handle_.topk, handle_.topk);
  }
  bool isChosen(size_t token) const {
    return std::ranges::any_of(chosenBy(token), [](int32_t expert) { return expert != kNoExpert; });
  }
  void writeRow(size_t token, std::byte* to) const {
    const uint16_t* row = call_.x + token * shape_.hidden;
    if (call_.format == RowFormat::kBf16) {
      copyRow(to, row, bf16Bytes(shape_.hidden), CopyHint::kCached);
    } else {
      castRowToFp8(row, shape_.hidden, call_.format == RowFormat::kFp8Rounded,
                   reinterpret_cast<uint8_t*>(to + scaleBytes(shape_.hidden)),
                   reinterpret_cast<float*>(to));
    }
  }

  // ---- taking

  // A row for one of our experts.
  struct Arrival {
    const std::byte* row;  // in sent form
    uint32_t expert;       // local
    uint32_t place;
  };

  Status take(Operation& op) {
    failpoint("ep-take");
    MOONCAKE_TRY(awaitBegun(op, call_.waits));
    std::vector<std::pair<int, DispatchTable>> tables;
    for (const int r : op.ranks()) {
      auto table = DispatchTable::of(op, r, shape_, rowBytes_);
      if (!table.ok()) return table.error();
      tables.emplace_back(r, std::move(*table));
    }
    RankSet participants;
    for (const auto& [r, table] : tables) participants.add(r);
    for (const auto& [r, table] : tables) participants &= table.mask;

    auto landing = fetchAll(op, tables, participants);
    if (!landing.ok()) return landing.error();
    MOONCAKE_TRY(plan(op, tables, participants, *landing));
    copyRows();
    writeHandle(op, std::move(participants));
    return {};
  }

  // Rows that are not reached here, by rank: null for those that are.
  Result<std::vector<const std::byte*>> fetchAll(
      Operation& op, const std::vector<std::pair<int, DispatchTable>>& tables,
      const RankSet& participants) {
    std::vector<const std::byte*> landed(size_t(op.size()), nullptr);
    if (op.unmapped() == 0 || !participants.contains(op.rank())) return landed;
    const auto isFetched = [&](int r, const DispatchTable& table) {
      return participants.contains(r) && op.isPayloadOurs(r) && table.rowsAt == RowsAt::kStaging &&
             table.packedRows > 0;
    };
    size_t total = 0;
    for (const auto& [r, table] : tables) {
      if (isFetched(r, table)) total += table.packedRows * rowBytes_;
    }
    auto memory = op.group().scratch(total);
    if (!memory.ok()) return memory.error();
    std::byte* at = *memory;
    Fetches fetches(op);
    for (const auto& [r, table] : tables) {
      if (!participants.contains(r) || !op.isPayloadOurs(r)) continue;
      landed[size_t(r)] = table.payloadRows;
      if (!isFetched(r, table)) continue;
      const size_t bytes = table.packedRows * rowBytes_;
      MOONCAKE_TRY(fetches.start(r, op.slot(r).input, table.packedOffset, {at, bytes}));
      landed[size_t(r)] = at;
      at += bytes;
    }
    MOONCAKE_TRY(fetches.await());
    return landed;
  }

  Status plan(const Operation& op, const std::vector<std::pair<int, DispatchTable>>& tables,
              const RankSet& participants, const std::vector<const std::byte*>& landed) {
    const size_t ours = experts_.numLocal(op.rank()), ranks = size_t(op.size());
    const size_t perExpert = ranks * shape_.maxTokens;
    arrivals_.clear();
    next_.assign(ours, 0);
    ranges_.assign(ours * ranks, {});
    const bool takesPart = participants.contains(op.rank());
    for (const auto& [r, table] : tables) {
      if (!takesPart || !participants.contains(r)) continue;
      for (size_t e = 0; e < ours; ++e) ranges_[e * ranks + size_t(r)].begin = next_[e];
      MOONCAKE_TRY(planFrom(op, r, table, landed[size_t(r)], perExpert));
      for (size_t e = 0; e < ours; ++e) {
        auto& range = ranges_[e * ranks + size_t(r)];
        range.count = next_[e] - range.begin;
      }
    }
    return {};
  }

  Status planFrom(const Operation& op, int from, const DispatchTable& table,
                  const std::byte* landed, size_t perExpert) {
    const std::byte* staging = nullptr;
    if (!landed) {
      staging = op.group().window().peerArena(from, table.arenaOffset, table.tokens * rowBytes_);
      if (!staging && table.tokens > 0) return nonsense(op, from);
    }
    size_t packed = 0;
    for (size_t t = 0; t < table.tokens; ++t) {
      bool isOurs = false;
      for (size_t j = 0; j < table.topk; ++j) {
        const int32_t expert = table.experts[t * table.topk + j];
        if (expert == kNoExpert || experts_.owner(expert) != op.rank()) continue;
        isOurs = true;
        const auto e = uint32_t(experts_.local(expert));
        if (next_[e] == perExpert || (landed && packed == table.packedRows))
          return nonsense(op, from);
        call_.sources[e * perExpert + next_[e]] = int32_t(t);
        arrivals_.push_back(
            {landed ? landed + packed * rowBytes_ : staging + t * rowBytes_, e, next_[e]++});
      }
      packed += isOurs;
    }
    return {};
  }

  Status nonsense(const Operation& op, int from) const {
    MOONCAKE_TRY(op.unlessFenced());
    return {ErrorCode::kProtocol,
            op.group().nameRank(from) +
                " announced rows outside of its memory: do all ranks run the same version?"};
  }
  void copyRows() {
    const size_t perExpert = size_t(shape_.numRanks) * shape_.maxTokens;
    const bool isFp8 = call_.format != RowFormat::kBf16;
    const size_t channels = isFp8 ? shape_.hidden : bf16Bytes(shape_.hidden);
    const size_t skip = isFp8 ? scaleBytes(shape_.hidden) : 0;
    const CopyHint hint = copyHint(arrivals_.size() * channels);
    for (const Arrival& arrival : arrivals_) {
      const size_t row = arrival.expert * perExpert + arrival.place;
      copyRow(call_.rows + row * channels, arrival.row + skip, channels, hint);
    }
    if (isFp8) copyScales(perExpert);
  }

  // To where rows lie side by side, as matrix products want them: for a cache line's worth of rows
  // at a time.
  void copyScales(size_t perExpert) {
    std::vector<std::vector<const std::byte*>> rows(next_.size());  // by expert and place
    for (size_t e = 0; e < rows.size(); ++e) rows[e].reserve(next_[e]);
    for (const Arrival& arrival : arrivals_) rows[arrival.expert].push_back(arrival.row);
    const size_t scales = scalesOf(shape_.hidden);
    const size_t words = call_.packsScales ? (scales + 3) / 4 : scales;
    constexpr size_t kRows = 64 / sizeof(uint32_t);
    for (size_t e = 0; e < rows.size(); ++e) {
      for (size_t begin = 0; begin < rows[e].size(); begin += kRows) {
        const size_t count = std::min(kRows, rows[e].size() - begin);
        for (size_t word = 0; word < words; ++word) {
          uint32_t line[kRows];
          for (size_t i = 0; i < count; ++i) line[i] = scaleWord(rows[e][begin + i], word, scales);
          const size_t at = (e * words + word) * perExpert + begin;
          std::memcpy(call_.scales + at * sizeof(uint32_t), line, count * sizeof(uint32_t));
        }
      }
    }
  }

  uint32_t scaleWord(const std::byte* row, size_t word, size_t scales) const {
    uint32_t value;
    if (call_.packsScales) {
      int32_t packed;
      packUe8m0(reinterpret_cast<const float*>(row) + 4 * word,
                std::min<size_t>(4, scales - 4 * word), &packed);
      value = static_cast<uint32_t>(packed);
    } else {
      std::memcpy(&value, row + word * sizeof(value), sizeof(value));
    }
    return value;
  }

  void writeHandle(const Operation& op, RankSet participants) {
    const size_t ours = experts_.numLocal(op.rank()), ranks = size_t(op.size());
    for (size_t e = 0; e < ours; ++e) {
      call_.counts[e] = int32_t(next_[e]);
      for (size_t r = 0; r < ranks; ++r) {
        const auto& range = ranges_[e * ranks + r];
        call_.ranges[e * ranks + r] = int64_t(range.begin) << 32 | range.count;
      }
    }
    handle_.number = op.number();
    handle_.participants = participants;
    handle_.ranges = ranges_;
    ending_.participants = std::move(participants);
  }

  const Memory& memory_;
  DispatchCall& call_;
  Ending& ending_;
  Handle& handle_;
  const Shape& shape_;
  const ExpertMap& experts_;
  const size_t rowBytes_;
  std::vector<Packed> packed_;  // by rank
  size_t mostPutBytes_ = 0;     // of rows that go with a table
  std::vector<Arrival> arrivals_;
  std::vector<uint32_t> next_;               // by local expert
  std::vector<CombineTable::Range> ranges_;  // [local expert][rank]
};

}  // namespace

Status dispatch(const Memory& memory, DispatchCall& call, Ending& ending) {
  const Handle& handle = *call.handle;
  const Call what{
      .verb = Verb::kDispatch,
      .dtype = call.format == RowFormat::kBf16 ? DType::kBFloat16 : DType::kFloat8E4M3FN,
      .root = handle.shape.numExperts,
      .count = handle.shape.hidden,
      .tensors = uint32_t(handle.shape.maxTokens),
      .lengths = handle.experts->hash() + uint32_t(call.format)};
  Dispatch dispatch(memory, call, ending);
  Operation op(memory.group, what, call.deadline);
  if (call.patience) op.skipAfter(*call.patience);
  MOONCAKE_TRY(op.run(dispatch));
  if (op.wasSkipped()) dispatch.endSkipped(op);
  if (call.addedCounts) {
    for (size_t e = 0; e < handle.experts->numLocal(memory.group.rank()); ++e)
      call.addedCounts[e] += call.counts[e];
  }
  call.handle->isDone.store(true, std::memory_order_release);
  return {};
}

}  // namespace mooncake::ep
