#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "ep/layout.h"
#include "group/operation.h"
#include "membership/rank_set.h"

// The tables that ranks publish in the slots of a dispatch and of a combine. They are decoded here,
// from a copy: a rank that the group went on without may read one while it changes.
namespace mooncake::ep {

constexpr int32_t kNoExpert = -1;
// Most bytes of rows for one rank of another host that go with the table, because a fetch costs a
// round trip. The other half of a slot is for the table.
inline size_t mostInlineBytes(const Group& group) {
  return std::min<size_t>(64 << 10, group.slotBytes() / 2);
}

// The owner of each expert. The same on all ranks.
class ExpertMap {
 public:
  // Gives all ranks as many consecutive experts; if there is a rest, the first ranks have one more.
  ExpertMap(int numExperts, int numRanks);
  // owners[e]: the rank of expert e.
  ExpertMap(std::vector<int> owners, int numRanks);

  int numExperts() const { return static_cast<int>(owners_.size()); }
  int owner(int expert) const { return owners_[size_t(expert)]; }
  const std::vector<int>& owners() const { return owners_; }  // by expert
  // Index of the expert among its owner's experts, from 0 on, in ascending order.
  int local(int expert) const { return local_[size_t(expert)]; }
  size_t numLocal(int rank) const { return counts_[size_t(rank)]; }
  // The experts of a rank, ascending.
  std::span<const int> expertsOf(int rank) const {
    return std::span(byRank_).subspan(begins_[size_t(rank)], counts_[size_t(rank)]);
  }
  size_t mostLocal() const;
  uint32_t hash() const;

 private:
  std::vector<int> owners_;
  std::vector<int> local_;
  std::vector<size_t> counts_;  // by rank
  std::vector<size_t> begins_;  // by rank: index in byRank_ of its first expert
  std::vector<int> byRank_;     // all experts, each rank's side by side
};

// kInvalidArgument: tokens that name an expert more than once send it more than `most` rows. Each
// place in top-k is a row of its own.
Status checkRepeated(const ExpertMap& map, std::span<const int32_t> chosen, size_t most, int rank);

// Place of the rows for the reader.
enum class RowsAt : uint8_t {
  kStaging,  // in the sender's staging: mapped, or fetched from there, see SharedRows
  kPushed,   // in the send memory of the reader, or of another rank of its host, by puts
  kWritten,  // likewise, by writes of the sender's cards, in larger pieces
  kPayload,  // behind the table, for the one rank that this payload was put to
};

// The sender pushes the rows before a request.
inline bool isPushed(RowsAt at) { return at == RowsAt::kPushed || at == RowsAt::kWritten; }

// Payload of a dispatch, wire form:
//   u32 bytes of the table, these included
//   u32 tokens  u32 top-k  u64 offset of the staging in the sender's arena
//   u8 rows at  u32 number of rows for the reader, or for its host  u64 their offset in the
//   sender's region
//   GroupRanks mask: the ranks that the caller counts as active
//   experts[tokens][top-k]: u16 each, or u32 from 65535 experts on; all bits set: none
//   zeros up to a multiple of 16, for the rows' alignment
// then the rows, if they are in the payload.
struct DispatchTable {
  uint32_t tokens = 0;
  uint32_t topk = 0;
  uint64_t arenaOffset = 0;
  RowsAt rowsAt = RowsAt::kStaging;
  uint32_t packedRows = 0;
  uint64_t packedOffset = 0;
  GroupRanks mask;
  std::vector<int32_t> experts;  // [tokens][topk], kNoExpert or below numExperts
  const std::byte* payloadRows = nullptr;

  Bytes encode(int numExperts) const;
  // Overwrites the fields of an encoded table that describe the reader's rows. All other fields are
  // the same for all readers, and are encoded once.
  static void setRows(std::span<std::byte> encoded, RowsAt at, uint32_t packedRows,
                      uint64_t packedOffset);
  // Decodes a table without its length. kProtocol: a field does not fit the shape.
  static Result<DispatchTable> decode(ByteView table, const Shape& shape);
  // Upper bound of the bytes of a table without rows.
  static size_t bytesFor(size_t tokens, size_t topk, int numExperts, int numRanks);
  // Decodes the table that the rank has published. Valid once the rank has begun.
  static Result<DispatchTable> of(const Operation& op, int rank, const Shape& shape,
                                  size_t rowBytes);
};

// Payload of a combine, wire form:
//   u32 bytes of the table, these included
//   u64 number of the dispatch  u64 offset of the staging in the sender's arena
//   u64 offset of the rows in the sender's region  u32 bytes of a row there
//   u8 rows at  u32 local experts  GroupRanks mask
//   u32 begin, u32 count for [local expert][rank]: the rows for that rank
//   zeros up to a multiple of 16
// then the reader's rows in that order, if they are in the payload.
struct CombineTable {
  struct Range {
    uint32_t begin = 0;
    uint32_t count = 0;
  };
  uint64_t dispatch = 0;
  uint64_t arenaOffset = 0;
  uint64_t regionOffset = 0;
  uint32_t regionRowBytes = 0;
  RowsAt rowsAt = RowsAt::kStaging;
  uint32_t localExperts = 0;
  GroupRanks mask;
  std::vector<Range> ranges;  // [local expert][rank], within the rows of an expert
  const std::byte* payloadRows = nullptr;

  Bytes encode() const;
  // Overwrites one field of an encoded table: all else is the same for all readers.
  static void setRowsAt(std::span<std::byte> encoded, RowsAt at);
  // Upper bound of the bytes of a table without rows.
  static size_t bytesFor(size_t localExperts, int numRanks);
  // Decodes a published table. `leastRowBytes`: for a row in the sender's region.
  static Result<CombineTable> of(const Operation& op, int rank, const Shape& shape,
                                 size_t localExperts, size_t rowBytes, size_t leastRowBytes);
};

}  // namespace mooncake::ep
