// Every rank casts its rows once, into memory that the ranks of its host map, and publishes who
// chose which expert. Then each takes the rows for its experts: from the mapping; from another host
// out of the slot where they are few, else by one fetch. Cost: n rows written once, a row read for
// each (token, expert), one exchange of slots; over messages a second exchange says that all have
// what they need.
//
// What many rows of a rank are needed for by several ranks of another host crosses once: one of
// them fetches them (csrc/ep/shared_rows.h), tells its neighbours that they are there, and they
// read them in its memory. Few rows go to each rank by themselves, with the table.
//
// The order of the rows of an expert is (rank, token, place in top-k), whatever came first.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "base/failpoint.h"
#include "ep/calls.h"
#include "ep/participants.h"
#include "ep/shared_rows.h"
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
        rowBytes_(dispatchRowBytes(shape_.hidden, call.format)),
        us_{memory.group.rank()} {}

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

  // The rows for one rank that does not map us, or for all of its host.
  struct Packed {
    std::vector<uint32_t> tokens;
    size_t offset = 0;    // in the send memory; only of those that do not go with the table
    bool areAll = false;  // `tokens` or not: all stand there, at `offset` 0
  };

  void stage(const Operation& op) {
    std::byte* const staging = memory_.send(op.number());
    const CopyHint hint = stagingHint(op, handle_.tokens * rowBytes_);
    for (size_t t = 0; t < handle_.tokens; ++t) {
      if (isChosen(t)) writeRow(t, staging + t * rowBytes_, hint);
    }
    packed_.assign(size_t(op.size()), {});
    mostPutBytes_ = 0;
    shared_.reset();
    if (op.unmapped() == 0) return;
    shared_.emplace(memory_.hosts, op.ranks(), shape_.maxTokens * rowBytes_,
                    mostInlineBytes(memory_.group) / rowBytes_);
    size_t offset = handle_.tokens * rowBytes_;
    for (const auto& host : shared_->hosts()) {
      if (std::ranges::binary_search(host, op.rank())) continue;
      auto tokens = tokensFor(handle_.chosen, handle_.topk, experts_, host);
      if (shared_->isShared(host, tokens.size())) {
        Packed packed{std::move(tokens), offset};
        offset = pack(op, packed);
        for (const int r : host) packed_[size_t(r)] = packed;
        continue;
      }
      for (const int r : host) {
        Packed& packed = packed_[size_t(r)];
        packed = {tokensFor(handle_.chosen, handle_.topk, experts_, {{r}}), offset};
        const size_t bytes = packed.tokens.size() * rowBytes_;
        if (bytes <= mostInlineBytes(memory_.group)) {
          mostPutBytes_ = std::max(mostPutBytes_, bytes);
        } else if (!op.group().window().peerPtr(r)) {
          offset = pack(op, packed);
        }
      }
    }
  }

  // Where the next ones go. Where nearly all are wanted, the few others cost less on the way than
  // copying all of these costs here.
  size_t pack(const Operation& op, Packed& packed) const {
    if (16 * packed.tokens.size() >= 15 * handle_.tokens) {
      packed.areAll = true;
      return std::exchange(packed.offset, 0);
    }
    std::byte* const staging = memory_.send(op.number());
    size_t offset = packed.offset;
    for (const uint32_t t : packed.tokens) {
      std::memcpy(staging + offset, staging + t * rowBytes_, rowBytes_);
      offset += rowBytes_;
    }
    return offset;
  }

  size_t putFor(const Operation& op, int to, DispatchTable table, std::byte* payload) const {
    const Packed& packed = packed_[size_t(to)];
    const size_t bytes = packed.tokens.size() * rowBytes_;
    table.rowsAt = bytes <= mostInlineBytes(memory_.group) ? RowsAt::kPayload : RowsAt::kStaging;
    table.packedRows = uint32_t(packed.areAll ? handle_.tokens : packed.tokens.size());
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
  void writeRow(size_t token, std::byte* to, CopyHint hint) const {
    const uint16_t* row = call_.x + token * shape_.hidden;
    if (call_.format == RowFormat::kBf16) {
      copyRow(to, row, bf16Bytes(shape_.hidden), hint);
    } else {
      castRowToFp8(row, shape_.hidden, call_.format == RowFormat::kFp8Rounded,
                   reinterpret_cast<uint8_t*>(to + scaleBytes(shape_.hidden)),
                   reinterpret_cast<float*>(to));
    }
  }

  // ---- taking

  // A row for one of our experts.
  struct Arrival {
    enum Way : uint8_t { kHere, kFetched, kByNeighbour } way;
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

    std::deque<Fetch> fetches;
    const auto areAnyShared = startFetches(op, tables, participants, fetches);
    if (!areAnyShared.ok()) return areAnyShared.error();
    MOONCAKE_TRY(plan(op, tables, participants));
    copyRows(Arrival::kHere);  // while the others come
    size_t copied = 0;         // of the arrivals
    for (Fetch& fetch : fetches) {
      MOONCAKE_TRY(fetch.rows.await());
      copied = copyFetched(copied, fetch.target);
    }
    if (*areAnyShared) {
      MOONCAKE_TRY(op.publishReady({}));
      MOONCAKE_TRY(op.awaitReady(shared_->hostOf(op.rank())));
      copyRows(Arrival::kByNeighbour);
    }
    if (call_.format != RowFormat::kBf16) copyScales();
    writeHandle(op, std::move(participants));
    return {};
  }

  // The rows of a rank that does not map us: for us alone, or for our host.
  struct Landed {
    const std::byte* rows = nullptr;  // packed
    std::span<const int> readers;
    Arrival::Way way = Arrival::kHere;
  };
  // Some of them on their way: when the first have come, they are copied while the others come.
  struct Fetch {
    explicit Fetch(Operation& op, std::span<std::byte> to) : rows(op), target(to) {}
    Fetches rows;
    std::span<std::byte> target;
  };
  // The smaller the sooner; each by several cards costs them an answer on top.
  static constexpr size_t kFetchBytes = size_t(256) << 10;
  static constexpr size_t kCardFetchBytes = size_t(1) << 20;
  using Tables = std::vector<std::pair<int, DispatchTable>>;

  // Whether rows are shared on any host: then all say when they have what they fetch.
  Result<bool> startFetches(Operation& op, const Tables& tables, const RankSet& participants,
                            std::deque<Fetch>& fetches) {
    landed_.assign(size_t(op.size()), {});
    if (!shared_) return false;
    const auto& ourHost = shared_->hostOf(op.rank());
    const bool takesPart = participants.contains(op.rank());
    const auto isOurs = [&](const DispatchTable& table, int r) {
      return takesPart && op.isPayloadOurs(r) && table.rowsAt == RowsAt::kStaging;
    };
    bool areAnyShared = false;
    size_t total = 0;
    std::vector<bool> isForHost(size_t(op.size()));
    for (const auto& [r, table] : tables) {
      if (!participants.contains(r)) continue;
      for (const auto& host : shared_->hosts()) {
        if (std::ranges::binary_search(host, r)) continue;
        const size_t rows = tokensFor(table.experts, table.topk, experts_, host).size();
        if (!shared_->isShared(host, rows)) continue;
        areAnyShared = true;
        if (&host != &ourHost) continue;
        isForHost[size_t(r)] = true;
        if (table.packedRows != rows && table.packedRows != table.tokens) return nonsense(op, r);
      }
      if (!isForHost[size_t(r)] && isOurs(table, r)) total += table.packedRows * rowBytes_;
    }
    auto memory = op.group().scratch(total);
    if (!memory.ok()) return memory.error();
    std::byte* at = *memory;
    for (const auto& [r, table] : tables) {
      if (!participants.contains(r)) continue;
      const size_t bytes = table.packedRows * rowBytes_;
      if (isForHost[size_t(r)]) {
        const auto [by, offset] = shared_->fetch(r, ourHost);
        landed_[size_t(r)] = {fetchedRows(tables, op, by, offset, bytes), ourHost,
                              by == op.rank() ? Arrival::kFetched : Arrival::kByNeighbour};
        if (!landed_[size_t(r)].rows) return nonsense(op, by);
        if (by != op.rank()) continue;
        MOONCAKE_TRY(fetch(op, r, table, {memory_.send(op.number()) + offset, bytes}, fetches));
      } else if (isOurs(table, r) && bytes > 0) {
        MOONCAKE_TRY(fetch(op, r, table, {at, bytes}, fetches));
        landed_[size_t(r)] = {at, us_, Arrival::kFetched};
        at += bytes;
      } else if (op.isPayloadOurs(r)) {
        landed_[size_t(r)] = {table.payloadRows, us_, Arrival::kHere};
      }
    }
    return areAnyShared;
  }

  Status fetch(Operation& op, int from, const DispatchTable& table, std::span<std::byte> to,
               std::deque<Fetch>& fetches) const {
    const size_t most = op.group().window().hasCards(from) ? kCardFetchBytes : kFetchBytes;
    const size_t step = std::max<size_t>(most / rowBytes_, 1) * rowBytes_;
    for (size_t at = 0; at < to.size(); at += step) {
      const auto part = to.subspan(at, std::min(step, to.size() - at));
      fetches.emplace_back(op, part);
      MOONCAKE_TRY(
          fetches.back().rows.start(from, op.slot(from).input, table.packedOffset + at, part));
    }
    return {};
  }

  // In the send memory of a rank of our host; null: that is not where it says.
  const std::byte* fetchedRows(const Tables& tables, const Operation& op, int by, size_t offset,
                               size_t bytes) const {
    if (by == op.rank()) return memory_.send(op.number()) + offset;
    const auto its = std::ranges::find(tables, by, [](const auto& one) { return one.first; });
    return op.group().window().peerArena(by, its->second.arenaOffset + offset, bytes);
  }

  Status plan(const Operation& op, const Tables& tables, const RankSet& participants) {
    const size_t ours = experts_.numLocal(op.rank()), ranks = size_t(op.size());
    const size_t perExpert = ranks * shape_.maxTokens;
    arrivals_.clear();
    next_.assign(ours, 0);
    ranges_.assign(ours * ranks, {});
    const bool takesPart = participants.contains(op.rank());
    for (const auto& [r, table] : tables) {
      if (!takesPart || !participants.contains(r)) continue;
      for (size_t e = 0; e < ours; ++e) ranges_[e * ranks + size_t(r)].begin = next_[e];
      MOONCAKE_TRY(planFrom(op, r, table, perExpert));
      for (size_t e = 0; e < ours; ++e) {
        auto& range = ranges_[e * ranks + size_t(r)];
        range.count = next_[e] - range.begin;
      }
    }
    return {};
  }

  Status planFrom(const Operation& op, int from, const DispatchTable& table, size_t perExpert) {
    const auto& [landed, readers, way] = landed_[size_t(from)];
    const bool areAll = table.packedRows == table.tokens;
    const std::byte* staging = nullptr;
    if (!landed) {
      staging = op.group().window().peerArena(from, table.arenaOffset, table.tokens * rowBytes_);
      if (!staging && table.tokens > 0) return nonsense(op, from);
    }
    size_t packed = 0;
    for (size_t t = 0; t < table.tokens; ++t) {
      bool isPacked = false;
      for (size_t j = 0; j < table.topk; ++j) {
        const int32_t expert = table.experts[t * table.topk + j];
        if (expert == kNoExpert) continue;
        const int owner = experts_.owner(expert);
        isPacked |= std::ranges::find(readers, owner) != readers.end();
        if (owner != op.rank()) continue;
        const auto e = uint32_t(experts_.local(expert));
        const size_t index = landed && !areAll ? packed : t;
        if (next_[e] == perExpert || (landed && index >= table.packedRows))
          return nonsense(op, from);
        call_.sources[e * perExpert + next_[e]] = int32_t(t);
        arrivals_.push_back({way, (landed ? landed : staging) + index * rowBytes_, e, next_[e]++});
      }
      packed += isPacked;
    }
    return {};
  }

  Status nonsense(const Operation& op, int from) const {
    MOONCAKE_TRY(op.unlessFenced());
    return {ErrorCode::kProtocol,
            op.group().nameRank(from) +
                " announced rows outside of its memory: do all ranks run the same version?"};
  }

  void copyRows(Arrival::Way way) const {
    const CopyHint hint = hintForAll();
    for (const Arrival& arrival : arrivals_) {
      if (arrival.way == way) copyArrival(arrival, hint);
    }
  }

  // Those of the arrivals from `next` on whose rows stand in `landed`, and where to go on. They
  // come in the order of the fetches: by rank, and then by row.
  size_t copyFetched(size_t next, std::span<const std::byte> landed) const {
    const CopyHint hint = hintForAll();
    const std::byte* const end = landed.data() + landed.size();
    for (; next < arrivals_.size(); ++next) {
      const Arrival& arrival = arrivals_[next];
      if (arrival.way != Arrival::kFetched) continue;
      if (std::less<>()(arrival.row, landed.data()) || !std::less<>()(arrival.row, end)) break;
      copyArrival(arrival, hint);
    }
    return next;
  }

  size_t channelBytes() const {
    return call_.format == RowFormat::kBf16 ? bf16Bytes(shape_.hidden) : shape_.hidden;
  }
  CopyHint hintForAll() const { return copyHint(arrivals_.size() * channelBytes()); }

  void copyArrival(const Arrival& arrival, CopyHint hint) const {
    const size_t perExpert = size_t(shape_.numRanks) * shape_.maxTokens;
    const size_t channels = channelBytes();
    const size_t skip = call_.format == RowFormat::kBf16 ? 0 : scaleBytes(shape_.hidden);
    // Its scales stand in front, and are read last: by then from our cache.
    for (size_t at = 0; at < skip; at += 64) __builtin_prefetch(arrival.row + at);
    const size_t row = arrival.expert * perExpert + arrival.place;
    copyRow(call_.rows + row * channels, arrival.row + skip, channels, hint);
  }

  // To where rows lie side by side, as matrix products want them: for a cache line's worth of rows
  // at a time.
  void copyScales() const {
    const size_t perExpert = size_t(shape_.numRanks) * shape_.maxTokens;
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
  const std::array<int, 1> us_;
  std::optional<SharedRows> shared_;  // of the attempt, where not all map us
  std::vector<Packed> packed_;        // by rank
  size_t mostPutBytes_ = 0;           // of rows that go with a table
  std::vector<Landed> landed_;        // by rank; nothing of those that map us
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
