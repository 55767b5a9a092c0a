// Every rank casts its rows once, into memory that the ranks of its host map, and publishes which
// experts its tokens chose. Then each rank takes the rows for its experts. It reads rows of its
// own host in the mapping. Rows of another host come in the slot if they are few, else they are
// put, or this rank fetches them. Cost: n rows written once, a row read for each (token, expert),
// one exchange of slots; over messages a second exchange says that all ranks have their rows.
//
// Rows that several ranks of another host need cross once (csrc/ep/shared_rows.h). One of these
// ranks gets them by a put or a fetch, and tells its neighbours, which read them in its memory. A
// few rows go to each rank separately, with the table.
//
// The order of the rows of an expert is (rank, token, place in top-k), in any order of arrival.
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "base/failpoint.h"
#include "base/hash.h"
#include "ep/calls.h"
#include "ep/given_rows.h"
#include "ep/participants.h"
#include "ep/route_index.h"
#include "ep/shared_rows.h"
#include "group/fetches.h"
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
        rowBytes_(call.rowBytes()),
        given_(memory, call) {}

  Status publish(Operation& op) override {
    MOONCAKE_TRY(call_.inputs);
    MOONCAKE_TRY(given_.stage(op));
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
      MOONCAKE_TRY(op.beginSplit(
          given_.mostInTable() + bytes.size(),
          [&](int to, std::byte* payload) { return given_.write(op, to, bytes, payload); }));
    }
    if (op.group().window().fullyMapped()) return {};
    MOONCAKE_TRY(given_.push(op));
    return take(op);
  }

  Status complete(Operation& op) override {
    if (!op.group().window().fullyMapped()) return op.commitDone();
    MOONCAKE_TRY(take(op));
    return op.commit();
  }

  void stop(Operation&) override { given_.stop(); }

  // The other ranks did it without us.
  Status endSkipped(const Operation& op) {
    next_.assign(experts_.numLocal(op.rank()), 0);
    arrivals_.clear();
    ranges_.assign(next_.size() * size_t(op.size()), {});
    GroupRanks participants;
    for (const int r : op.ranks()) participants.add(r);
    writeHandle(op, participants & call_.mask);
    return {};
  }

 private:
  // ---- receiving

  // A row for one of our experts.
  struct Arrival {
    enum Way : uint8_t { kHere, kLanded, kByNeighbour } way;
    const std::byte* row;  // in sent form
    uint32_t expert;       // local
    uint32_t place;
    uint32_t token;  // at its rank
  };

  Status take(Operation& op) {
    failpoint("ep-take");
    MOONCAKE_TRY(awaitBegun(op, call_.waits));
    Tables tables;
    GroupRanks participants;
    arenaOffsets_.assign(size_t(op.size()), 0);
    for (const int r : op.ranks()) {
      auto table = DispatchTable::of(op, r, shape_, rowBytes_);
      if (!table.ok()) return table.error();
      participants.add(r);
      arenaOffsets_[size_t(r)] = table->arenaOffset;
      tables.emplace_back(r, std::move(*table));
    }
    for (const auto& [r, table] : tables) participants &= table.mask;

    std::deque<Piece> pieces;
    RouteIndex routes(experts_, given_.shared() ? &given_.shared()->table() : nullptr, op.rank());
    const auto areAnyShared = findRows(op, tables, participants, routes, pieces);
    if (!areAnyShared.ok()) return areAnyShared.error();
    MOONCAKE_TRY(plan(op, tables, participants, routes));
    MOONCAKE_TRY(writeSources(op));
    hint_ = copyHint(arrivals_.size() * channelBytes(), ranksOfHost(op));
    copyRows(Arrival::kHere);  // while the other rows arrive
    size_t copied = 0;         // index of the next arrival
    for (size_t i = 0; i < pieces.size(); ++i) {
      Piece& piece = pieces[i];
      MOONCAKE_TRY(piece.fetch ? piece.fetch->await() : op.awaitPut(piece.word));
      // All rows are in our memory: the last ones are copied while `done` is on its way.
      if (i + 1 == pieces.size() && !*areAnyShared) op.publishDone();
      copied = copyLanded(copied, piece.rows);
    }
    if (*areAnyShared) {
      MOONCAKE_TRY(op.publishReady({}));
      MOONCAKE_TRY(op.awaitReady(given_.shared()->hostOf(op.rank())));
      copyRows(Arrival::kByNeighbour);
    }
    if (isCast()) copyScales();
    writeHandle(op, std::move(participants));
    return {};
  }

  // The rows of a rank that does not map us: rows for this rank, or rows for our whole host.
  struct Landed {
    const std::byte* rows = nullptr;  // packed
    bool isForHost = false;
    Arrival::Way way = Arrival::kHere;
  };
  // Some of these rows, in flight: one piece is copied while the next ones arrive.
  struct Piece {
    std::span<const std::byte> rows;
    std::optional<Fetches> fetch;
    size_t word = 0;  // without a fetch: the word that is stamped when the put rows are here
  };
  static constexpr size_t kFetchBytes = size_t(256) << 10;
  // Each piece costs the cards one more answer, so there are few pieces. Each is half of the rest,
  // because all ranks wait until the last piece is copied.
  static constexpr size_t kMostCardFetchBytes = size_t(1) << 20;
  using Tables = std::vector<std::pair<int, DispatchTable>>;

  // Starts the fetches. Returns true if rows are shared on any host: then every rank signals
  // `ready` when it has the rows that come to it.
  Result<bool> findRows(Operation& op, const Tables& tables, const GroupRanks& participants,
                        RouteIndex& routes, std::deque<Piece>& pieces) {
    landed_.assign(size_t(op.size()), {});
    if (!given_.shared()) {
      for (const auto& [r, table] : tables) routes.read(r, table.experts, table.topk);
      return false;
    }
    const SharedRows& shared = *given_.shared();
    const HostTable& hosts = shared.table();
    const int ours = hosts.indexOf(op.rank());
    const auto& ourHost = shared.hostOf(op.rank());
    std::byte* const landing = memory_.send(op.number());
    const bool takesPart = participants.contains(op.rank());
    bool areAnyShared = false;
    size_t total = 0;  // bytes that are fetched for this rank alone
    std::vector<bool> isForHost(size_t(op.size()));
    for (const auto& [r, table] : tables) {
      routes.read(r, table.experts, table.topk);
      const int its = hosts.indexOf(r);
      for (int h = 0; !areAnyShared && h < int(hosts.size()); ++h) {
        areAnyShared = h != its && participants.contains(r) &&
                       shared.isShared(hosts.hosts()[size_t(h)], routes.tokensFor(size_t(h)));
      }
      const size_t rows = routes.tokensFor(size_t(ours));
      if (its != ours && shared.isShared(ourHost, rows)) {
        isForHost[size_t(r)] = true;
        if (table.packedRows != rows && table.packedRows != table.tokens) return nonsense(op, r);
      }
      if (!isForHost[size_t(r)] && isFetched(op, table, r)) total += table.packedRows * rowBytes_;
    }
    auto memory = op.group().scratch(total);
    if (!memory.ok()) return memory.error();
    std::byte* at = *memory;
    for (const auto& [r, table] : tables) {
      const size_t bytes = table.packedRows * rowBytes_;
      const bool isTaken = takesPart && participants.contains(r);
      if (op.isPayloadOurs(r) && isPushed(table.rowsAt)) {
        const auto place = shared.pushed(r, ourHost);
        const bool isForUs = isForHost[size_t(r)] || ourHost.size() == 1;
        if (!place || !isForUs || bytes > kMostPushedBytes) return nonsense(op, r);
        // Awaited even if the rank takes no part: when the rows are here, the memory is ours again.
        if (place->by == op.rank())
          expect(op, r, table.rowsAt, {landing + place->offset, bytes}, pieces);
        MOONCAKE_TRY(found(op, r, *place, bytes, isForHost[size_t(r)]));
      } else if (isForHost[size_t(r)] && participants.contains(r)) {
        const auto place = shared.fetched(r, ourHost);
        MOONCAKE_TRY(found(op, r, place, bytes, true));
        if (place.by != op.rank()) continue;
        MOONCAKE_TRY(fetch(op, r, table, {landing + place.offset, bytes}, pieces));
      } else if (isTaken && isFetched(op, table, r) && bytes > 0) {
        MOONCAKE_TRY(fetch(op, r, table, {at, bytes}, pieces));
        landed_[size_t(r)] = {at, false, Arrival::kLanded};
        at += bytes;
      } else if (op.isPayloadOurs(r)) {
        landed_[size_t(r)] = {table.payloadRows, false, Arrival::kHere};
      }
    }
    return areAnyShared;
  }

  bool isFetched(const Operation& op, const DispatchTable& table, int from) const {
    return op.isPayloadOurs(from) && table.rowsAt == RowsAt::kStaging;
  }

  // Records that the rows of a rank stand, or will stand, in the send memory of a rank of our host.
  Status found(const Operation& op, int from, const SharedRows::Place& place, size_t bytes,
               bool isForHost) {
    const std::byte* rows = memory_.send(op.number()) + place.offset;
    if (place.by != op.rank()) {
      const uint64_t offset = arenaOffsets_[size_t(place.by)] + place.offset;
      rows = op.group().window().peerArena(place.by, offset, bytes);
      if (!rows) return nonsense(op, place.by);
    }
    landed_[size_t(from)] = {rows, isForHost,
                             place.by == op.rank() ? Arrival::kLanded : Arrival::kByNeighbour};
    return {};
  }

  void expect(const Operation& op, int from, RowsAt at, std::span<const std::byte> rows,
              std::deque<Piece>& pieces) const {
    const size_t step = pushBytes(rows.size(), rowBytes_, at == RowsAt::kWritten);
    size_t word = op.group().layout().pushes(from);
    for (size_t done = 0; done < rows.size(); done += step, word += sizeof(uint64_t)) {
      Piece& piece = pieces.emplace_back();
      piece.rows = rows.subspan(done, std::min(step, rows.size() - done));
      piece.word = word;
    }
  }

  Status fetch(Operation& op, int from, const DispatchTable& table, std::span<std::byte> to,
               std::deque<Piece>& pieces) const {
    const bool byCards = op.group().window().hasCards(from);
    for (size_t at = 0, step = 0; at < to.size(); at += step) {
      const size_t left = to.size() - at;
      const size_t most =
          byCards ? std::clamp(left / 2, kFetchBytes, kMostCardFetchBytes) : kFetchBytes;
      step = std::min(std::max<size_t>(most / rowBytes_, 1) * rowBytes_, left);
      const auto part = to.subspan(at, step);
      Piece& piece = pieces.emplace_back();
      piece.rows = part;
      piece.fetch.emplace(op);
      MOONCAKE_TRY(piece.fetch->start(from, op.slot(from).input, table.packedOffset + at, part));
    }
    return {};
  }

  Status plan(const Operation& op, const Tables& tables, const GroupRanks& participants,
              const RouteIndex& routes) {
    const size_t ours = experts_.numLocal(op.rank()), ranks = size_t(op.size());
    const size_t perExpert = ranks * shape_.maxTokens;
    arrivals_.clear();
    next_.assign(ours, 0);
    ranges_.assign(ours * ranks, {});
    const bool takesPart = participants.contains(op.rank());
    for (const auto& [r, table] : tables) {
      if (!takesPart || !participants.contains(r)) continue;
      for (size_t e = 0; e < ours; ++e) ranges_[e * ranks + size_t(r)].begin = next_[e];
      MOONCAKE_TRY(planFrom(op, r, table, routes.choicesOf(r), perExpert));
      for (size_t e = 0; e < ours; ++e) {
        auto& range = ranges_[e * ranks + size_t(r)];
        range.count = next_[e] - range.begin;
      }
    }
    return {};
  }

  Status planFrom(const Operation& op, int from, const DispatchTable& table,
                  std::span<const RouteIndex::Choice> choices, size_t perExpert) {
    const auto& [landed, isForHost, way] = landed_[size_t(from)];
    const bool areAll = table.packedRows == table.tokens;
    const std::byte* staging = nullptr;
    if (!landed) {
      staging = op.group().window().peerArena(from, table.arenaOffset, table.tokens * rowBytes_);
      if (!staging && table.tokens > 0) return nonsense(op, from);
    }
    for (const auto& [token, e, inHost, inRank] : choices) {
      const size_t packed = isForHost ? inHost : inRank;
      const size_t index = landed && !areAll ? packed : token;
      if (next_[e] == perExpert || (landed && index >= table.packedRows)) return nonsense(op, from);
      size_t place = next_[e]++;
      if (!call_.places.empty()) {  // there is one expert
        const auto& [begin, end] = call_.places[size_t(from)];
        place = begin + (place - ranges_[size_t(from)].begin);
        if (place >= end) return nonsense(op, from);
      }
      arrivals_.push_back(
          {way, (landed ? landed : staging) + index * rowBytes_, e, uint32_t(place), token});
    }
    return {};
  }

  // The place of the row among the rows of all our experts.
  size_t placeOf(const Arrival& arrival) const {
    return arrival.expert * size_t(shape_.numRanks) * shape_.maxTokens + arrival.place;
  }

  Status writeSources(const Operation& op) const {
    if (call_.room && arrivals_.size() > *call_.room) {
      return {ErrorCode::kProtocol, "dispatch: " + op.group().nameRank(op.rank()) + " receives " +
                                        std::to_string(arrivals_.size()) +
                                        " rows, which the ranks counted as no more than " +
                                        std::to_string(*call_.room) +
                                        ": do all ranks run the same version?"};
    }
    if (!call_.sources) return {};
    for (const Arrival& arrival : arrivals_)
      call_.sources[placeOf(arrival)] = int32_t(arrival.token);
    return {};
  }

  Status nonsense(const Operation& op, int from) const {
    MOONCAKE_TRY(op.unlessFenced());
    return {ErrorCode::kProtocol,
            op.group().nameRank(from) +
                " announced rows outside of its memory: do all ranks run the same version?"};
  }

  void copyRows(Arrival::Way way) const {
    for (const Arrival& arrival : arrivals_) {
      if (arrival.way == way) copyArrival(arrival);
    }
  }

  // Copies the arrivals from `next` on that stand in `landed`, and returns the index of the next
  // one. Arrivals are in the order of the pieces: by rank, and then by row.
  size_t copyLanded(size_t next, std::span<const std::byte> landed) const {
    const std::byte* const end = landed.data() + landed.size();
    for (; next < arrivals_.size(); ++next) {
      const Arrival& arrival = arrivals_[next];
      if (arrival.way != Arrival::kLanded) continue;
      if (std::less<>()(arrival.row, landed.data()) || !std::less<>()(arrival.row, end)) break;
      copyArrival(arrival);
    }
    return next;
  }

  bool isCast() const {
    return call_.format == RowFormat::kFp8 || call_.format == RowFormat::kFp8Rounded;
  }
  size_t channelBytes() const {
    if (call_.format == RowFormat::kFields) return rowBytes_;
    return isCast() ? shape_.hidden : bf16Bytes(shape_.hidden);
  }

  void copyFields(const Arrival& arrival) const {
    const std::byte* from = arrival.row;
    for (const Field& field : call_.fields) {
      const bool isLarge = field.bytes >= kLeastStreamedBytes;
      copyRow(field.to + arrival.place * field.bytes, from, field.bytes,
              isLarge ? hint_ : CopyHint::kCached);
      from += sentBytes(field);
    }
  }

  void copyArrival(const Arrival& arrival) const {
    if (call_.format == RowFormat::kFields) return copyFields(arrival);
    const size_t channels = channelBytes();
    const size_t skip = isCast() ? scaleBytes(shape_.hidden) : 0;
    // The scales stand in front of the row and are read last, by then from our cache.
    for (size_t at = 0; at < skip; at += 64) __builtin_prefetch(arrival.row + at);
    copyRow(call_.rows + placeOf(arrival) * channels, arrival.row + skip, channels, hint_);
  }

  // Copies the scales to where rows lie side by side, as matrix products need them: one cache line
  // of rows at a time.
  void copyScales() const {
    const size_t perExpert = size_t(shape_.numRanks) * shape_.maxTokens;
    std::vector<std::vector<const std::byte*>> rows(next_.size());  // by expert and place
    for (size_t e = 0; e < rows.size(); ++e) rows[e].reserve(next_[e]);
    for (const Arrival& arrival : arrivals_) rows[arrival.expert].push_back(arrival.row);
    const size_t scales = scalesOf(shape_.hidden);
    const size_t words = scaleWordsOf(shape_.hidden, call_.packsScales);
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

  void writeHandle(const Operation& op, GroupRanks participants) {
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
  GivenRows given_;
  std::vector<Landed> landed_;          // by rank; empty for ranks that map us
  std::vector<uint64_t> arenaOffsets_;  // by rank: offset of its send memory in its arena
  std::vector<Arrival> arrivals_;
  CopyHint hint_ = CopyHint::kCached;        // for all arrivals
  std::vector<uint32_t> next_;               // by local expert
  std::vector<CombineTable::Range> ranges_;  // [local expert][rank]
};

}  // namespace

namespace {

// Rows of the same size may have other fields.
uint32_t hashOf(const DispatchCall& call) {
  if (call.fields.empty()) return 0;
  uint32_t hash = fnv1a({call.handle->shape.hidden, call.agreed});
  for (const Field& field : call.fields) hash = fnv1a({field.bytes}, hash);
  return hash;
}

}  // namespace

size_t DispatchCall::rowBytes() const {
  if (format != RowFormat::kFields) return dispatchRowBytes(handle->shape.hidden, format);
  size_t bytes = 0;
  for (const Field& field : fields) bytes += sentBytes(field);
  return bytes;
}

Status dispatch(const Memory& memory, DispatchCall& call, Ending& ending) {
  const Handle& handle = *call.handle;
  const bool hasFields = call.format == RowFormat::kFields;
  const Call what{.verb = Verb::kDispatch,
                  .dtype = hasFields                         ? DType::kUInt8
                           : call.format == RowFormat::kBf16 ? DType::kBFloat16
                                                             : DType::kFloat8E4M3FN,
                  .goesOn = call.goesOn && !call.patience,
                  .root = handle.shape.numExperts,
                  .count = hasFields ? call.rowBytes() : handle.shape.hidden,
                  .tensors = uint32_t(handle.shape.maxTokens),
                  .lengths = handle.experts->hash() + uint32_t(call.format) + hashOf(call)};
  Operation op(memory.group, what, call.deadline);
  Dispatch dispatch(memory, call, ending);  // destroyed first: it has writes of the operation
  if (call.patience) op.skipAfter(*call.patience);
  MOONCAKE_TRY(op.run(dispatch));
  if (op.wasSkipped()) MOONCAKE_TRY(dispatch.endSkipped(op));
  if (call.addedCounts) {
    for (size_t e = 0; e < handle.experts->numLocal(memory.group.rank()); ++e)
      call.addedCounts[e] += call.counts[e];
  }
  call.handle->isDone.store(true, std::memory_order_release);
  return {};
}

}  // namespace mooncake::ep
