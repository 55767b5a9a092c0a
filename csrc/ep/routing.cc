#include "ep/routing.h"

#include <cstring>
#include <string>

#include "base/hash.h"

namespace mooncake::ep {
namespace {

constexpr int kNarrowExperts = 0xffff;  // this many fit 16 bits beside the mark for none
constexpr size_t kRowAlignment = 16;    // alignment of the rows behind a table, as in send memory

Error misfit(const Operation& op, int rank, const std::string& why) {
  return {ErrorCode::kProtocol, op.group().nameRank(rank) +
                                    " published a table that does not fit: " + why +
                                    ". Do all ranks run the same version?"};
}

// Offsets in an encoded table, counted from its length field; layouts in routing.h.
constexpr size_t kDispatchRowsAt = 20;
constexpr size_t kCombineRowsAt = 32;

// A copy of a table, since the payload may change under us, and the rows behind it in the payload.
struct Published {
  Bytes table;
  const std::byte* behind = nullptr;
  size_t behindBytes = 0;
};

Result<Published> publishedBy(const Operation& op, int rank) {
  const Slot& slot = op.slot(rank);
  const size_t bytes = std::min<size_t>(slot.payloadBytes, op.group().slotBytes());
  uint32_t length = 0;
  if (bytes >= sizeof(length)) std::memcpy(&length, slot.payload, sizeof(length));
  if (length < sizeof(length) || length > bytes) {
    MOONCAKE_TRY(op.unlessFenced());
    return misfit(op, rank, "a length of " + std::to_string(length) + " bytes");
  }
  Published published;
  published.table.assign(slot.payload + sizeof(length), slot.payload + length);
  const size_t behind = std::min(roundUp(length, kRowAlignment), bytes);
  published.behind = slot.payload + behind;
  published.behindBytes = bytes - behind;
  return published;
}

Bytes withLength(ByteWriter& body) {
  const Bytes table = body.take();
  const auto length = static_cast<uint32_t>(table.size() + sizeof(uint32_t));
  Bytes whole = ByteWriter().put(length).putRaw(table).take();
  whole.resize(roundUp(length, kRowAlignment));
  return whole;
}

RowsAt rowsAtOf(uint8_t number) {
  const auto at = static_cast<RowsAt>(number);
  return at == RowsAt::kPayload || isPushed(at) ? at : RowsAt::kStaging;
}

template <typename Word>
void putExperts(ByteWriter& out, std::span<const int32_t> experts) {
  std::vector<Word> words(experts.begin(), experts.end());  // kNoExpert is -1: all bits set
  out.putRaw(std::as_bytes(std::span(words)));
}

// False: a number names no expert.
template <typename Word>
bool takeExperts(ByteView raw, int numExperts, std::vector<int32_t>& experts) {
  experts.resize(raw.size() / sizeof(Word));
  bool areKnown = true;
  for (size_t i = 0; i < experts.size(); ++i) {
    Word word;
    std::memcpy(&word, raw.data() + i * sizeof(Word), sizeof(Word));
    const bool isNone = word == static_cast<Word>(~Word(0));
    areKnown &= isNone || word < static_cast<Word>(numExperts);
    experts[i] = isNone ? kNoExpert : static_cast<int32_t>(word);
  }
  return areKnown;
}

}  // namespace

ExpertMap::ExpertMap(int numExperts, int numRanks)
    : ExpertMap(
          [&] {
            std::vector<int> owners;
            const int each = numExperts / numRanks, more = numExperts % numRanks;
            for (int rank = 0; rank < numRanks; ++rank)
              owners.insert(owners.end(), size_t(each + (rank < more)), rank);
            return owners;
          }(),
          numRanks) {}

ExpertMap::ExpertMap(std::vector<int> owners, int numRanks)
    : owners_(std::move(owners)), local_(owners_.size()), counts_(size_t(numRanks)) {
  for (size_t e = 0; e < owners_.size(); ++e)
    local_[e] = static_cast<int>(counts_[size_t(owners_[e])]++);
  begins_.reserve(counts_.size());
  for (size_t r = 0, begin = 0; r < counts_.size(); begin += counts_[r++]) begins_.push_back(begin);
  byRank_.resize(owners_.size());
  for (size_t e = 0; e < owners_.size(); ++e)
    byRank_[begins_[size_t(owners_[e])] + size_t(local_[e])] = static_cast<int>(e);
}

size_t ExpertMap::mostLocal() const { return *std::ranges::max_element(counts_); }

uint32_t ExpertMap::hash() const {
  uint32_t hash = fnv1a({});
  for (const int owner : owners_) hash = fnv1a({uint64_t(owner)}, hash);
  return hash;
}

Bytes DispatchTable::encode(int numExperts) const {
  ByteWriter out;
  out.put(tokens).put(topk).put(arenaOffset).put(static_cast<uint8_t>(rowsAt));
  out.put(packedRows).put(packedOffset);
  mask.write(out);
  if (numExperts < kNarrowExperts) {
    putExperts<uint16_t>(out, experts);
  } else {
    putExperts<uint32_t>(out, experts);
  }
  return withLength(out);
}

void DispatchTable::setRows(std::span<std::byte> encoded, RowsAt at, uint32_t packedRows,
                            uint64_t packedOffset) {
  const Bytes fields =
      ByteWriter().put(static_cast<uint8_t>(at)).put(packedRows).put(packedOffset).take();
  std::ranges::copy(fields, encoded.subspan(kDispatchRowsAt).begin());
}

Status checkRepeated(const ExpertMap& map, std::span<const int32_t> chosen, size_t most, int rank) {
  std::vector<uint32_t> rows(size_t(map.numExperts()));
  for (const int32_t expert : chosen) rows[size_t(std::max(expert, 0))] += expert != kNoExpert;
  const auto largest = std::ranges::max_element(rows);
  if (*largest <= most) return {};
  const auto expert = static_cast<int>(largest - rows.begin());
  return {ErrorCode::kInvalidArgument,
          "rank " + std::to_string(rank) + " sends " + std::to_string(*largest) +
              " rows to expert " + std::to_string(expert) + " of rank " +
              std::to_string(map.owner(expert)) + ", which has room for " + std::to_string(most) +
              " from each rank: tokens name it more than once"};
}

size_t DispatchTable::bytesFor(size_t tokens, size_t topk, int numExperts, int numRanks) {
  constexpr size_t kFixed = 64;
  const size_t width = numExperts < kNarrowExperts ? sizeof(uint16_t) : sizeof(uint32_t);
  return kFixed + size_t(numRanks + 63) / 64 * 8 + tokens * topk * width;
}

Result<DispatchTable> DispatchTable::of(const Operation& op, int rank, const Shape& shape,
                                        size_t rowBytes) {
  auto published = publishedBy(op, rank);
  if (!published.ok()) return published.error();
  auto table = decode(published->table, shape);
  if (table.ok() && table->rowsAt == RowsAt::kPayload &&
      table->packedRows > published->behindBytes / rowBytes)
    table = Error{ErrorCode::kProtocol, "its rows are cut short"};
  if (!table.ok()) {
    MOONCAKE_TRY(op.unlessFenced());
    return misfit(op, rank, table.error().message);
  }
  table->payloadRows = published->behind;
  return table;
}

Result<DispatchTable> DispatchTable::decode(ByteView encoded, const Shape& shape) {
  ByteReader in(encoded);
  DispatchTable table;
  table.tokens = in.get<uint32_t>();
  table.topk = in.get<uint32_t>();
  table.arenaOffset = in.get<uint64_t>();
  table.rowsAt = rowsAtOf(in.get<uint8_t>());
  table.packedRows = in.get<uint32_t>();
  table.packedOffset = in.get<uint64_t>();
  table.mask = GroupRanks::read(in);
  const bool isNarrow = shape.numExperts < kNarrowExperts;
  const size_t width = isNarrow ? sizeof(uint16_t) : sizeof(uint32_t);
  const uint64_t count = uint64_t(table.tokens) * table.topk;
  const bool fits = table.tokens <= shape.maxTokens && count <= in.left() / width;
  const ByteView experts = in.getRaw(fits ? count * width : 0);
  const Status whole = in.finish("table");
  const bool areKnown = isNarrow ? takeExperts<uint16_t>(experts, shape.numExperts, table.experts)
                                 : takeExperts<uint32_t>(experts, shape.numExperts, table.experts);
  if (!whole.ok()) return whole.error();
  if (!fits || !areKnown || table.packedRows > table.tokens)
    return Error{ErrorCode::kProtocol, "its numbers are out of bounds"};
  return table;
}

size_t CombineTable::bytesFor(size_t localExperts, int numRanks) {
  constexpr size_t kFixed = 64;
  return kFixed + size_t(numRanks + 63) / 64 * 8 + localExperts * size_t(numRanks) * sizeof(Range);
}

Bytes CombineTable::encode() const {
  ByteWriter out;
  out.put(dispatch).put(arenaOffset).put(regionOffset).put(regionRowBytes);
  out.put(static_cast<uint8_t>(rowsAt)).put(localExperts);
  mask.write(out);
  out.putRaw(std::as_bytes(std::span(ranges)));
  return withLength(out);
}

void CombineTable::setRowsAt(std::span<std::byte> encoded, RowsAt at) {
  encoded[kCombineRowsAt] = static_cast<std::byte>(at);
}

Result<CombineTable> CombineTable::of(const Operation& op, int rank, const Shape& shape,
                                      size_t localExperts, size_t rowBytes, size_t leastRowBytes) {
  auto published = publishedBy(op, rank);
  if (!published.ok()) return published.error();
  ByteReader in(published->table);
  CombineTable table;
  table.dispatch = in.get<uint64_t>();
  table.arenaOffset = in.get<uint64_t>();
  table.regionOffset = in.get<uint64_t>();
  table.regionRowBytes = in.get<uint32_t>();
  table.rowsAt = rowsAtOf(in.get<uint8_t>());
  table.localExperts = in.get<uint32_t>();
  table.mask = GroupRanks::read(in);
  table.ranges.resize(localExperts * size_t(shape.numRanks));
  const ByteView raw = in.getRaw(table.ranges.size() * sizeof(Range));
  const Status whole = in.finish("table");
  bool fits = whole.ok() && table.localExperts == localExperts && !isPushed(table.rowsAt) &&
              table.regionRowBytes >= leastRowBytes && table.regionRowBytes <= rowBytes;
  size_t rowsForUs = 0;
  if (fits) {
    std::ranges::copy(raw, std::as_writable_bytes(std::span(table.ranges)).begin());
    const size_t perExpert = size_t(shape.numRanks) * shape.maxTokens;
    for (const Range& range : table.ranges)
      fits &= range.begin <= perExpert && range.count <= perExpert - range.begin;
    for (size_t e = 0; e < localExperts; ++e)
      rowsForUs += table.ranges[e * size_t(shape.numRanks) + size_t(op.rank())].count;
    fits &= table.rowsAt != RowsAt::kPayload || rowsForUs <= published->behindBytes / rowBytes;
  }
  if (!fits) {
    MOONCAKE_TRY(op.unlessFenced());
    return misfit(op, rank, whole.ok() ? "its numbers are out of bounds" : whole.error().message);
  }
  table.payloadRows = published->behind;
  return table;
}

}  // namespace mooncake::ep
