#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ep/rows.h"

// The memory of a buffer. Every offset of it is in this file.
//
//   send 0, send 1   read by the other ranks: the rows that this rank sends, and rows that arrive
//                    for its whole host. One is for operations with even numbers, one for
//                    operations with odd numbers, like slots (group/slot.h)
//                    dispatch: [n] rows of this rank's tokens, in sent form
//                              then, for each host that does not map us, the rows for it, packed
//                              then rows of ranks of other hosts: SharedRows
//                    combine:  [local expert][rank * T + place] rows that the experts made
//   recv 0, recv 1   the result of a dispatch, [local expert][rank * T + place] rows. A dispatch
//                    has the memory that the newest result does not have: two are alive at a time
//
// A row in sent form: bf16 as it is, or scales (float32) | e4m3 channels, or fields.
//
// Results of the normal mode are tensors of the caller. Then there is no receive memory, and all is
// send memory.
namespace mooncake::ep {

enum class RowFormat : uint8_t {
  kBf16 = 0,
  kFp8 = 1,
  kFp8Rounded = 2,
  kFields = 3,  // the fields of a call of the normal mode, side by side
};

constexpr size_t roundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// The shape of a dispatch; the same on all ranks.
struct Shape {
  int numRanks = 1;
  int numExperts = 1;
  size_t maxTokens = 0;  // most tokens of one rank
  size_t hidden = 0;     // channels of a token
};

constexpr size_t bf16Bytes(size_t hidden) { return 2 * hidden; }
constexpr size_t scaleBytes(size_t hidden) { return sizeof(float) * scalesOf(hidden); }

// Bytes of one row in sent form, and of one row that an expert made.
inline size_t dispatchRowBytes(size_t hidden, RowFormat format) {
  return roundUp(format == RowFormat::kBf16 ? bf16Bytes(hidden) : scaleBytes(hidden) + hidden, 16);
}
inline size_t combineRowBytes(size_t hidden) {
  return roundUp(std::max(bf16Bytes(hidden), logfmtRowBytes(hidden)), 16);
}
// The same with further numbers of each row, which are summed beside it.
inline size_t normalCombineRowBytes(size_t hidden, size_t extras) {
  return combineRowBytes(hidden) + roundUp(extras * sizeof(float), 16);
}
// Words of the scales of one row that a dispatch returns: float32, or UE8M0, four in an int32.
constexpr size_t scaleWordsOf(size_t hidden, bool packsScales) {
  return packsScales ? (scalesOf(hidden) + 3) / 4 : scalesOf(hidden);
}
// Bytes of one row that a dispatch returns, its scales included.
inline size_t receivedRowBytes(size_t hidden) {
  return std::max(bf16Bytes(hidden), hidden + scaleBytes(hidden));
}

// Rows in send memory carry eight more bytes for a block of 128 channels than results do: 33 to 32.
class BufferLayout {
 public:
  explicit BufferLayout(size_t bytes, bool hasResults = true)
      : send_((hasResults ? bytes / 2 * 33 / 65 : bytes / 2) / kLine * kLine),
        recv_((bytes / 2 - send_) / kLine * kLine) {}

  size_t sendBytes() const { return send_; }
  size_t recvBytes() const { return recv_; }
  size_t send(uint64_t number) const { return (number & 1) * send_; }
  size_t recv(size_t which) const { return 2 * send_ + which * recv_; }

  // Offset of the scales in receive memory, behind this many rows of FP8.
  static size_t scalesOffset(size_t rows, size_t hidden) { return roundUp(rows * hidden, 64); }
  // Least send and receive memory for the rows of this many experts.
  static size_t sendNeed(const Shape& shape, size_t localExperts) {
    const size_t rows = localExperts * size_t(shape.numRanks) * shape.maxTokens;
    return std::max(shape.maxTokens * dispatchRowBytes(shape.hidden, RowFormat::kBf16),
                    rows * combineRowBytes(shape.hidden));
  }
  static size_t recvNeed(const Shape& shape, size_t localExperts) {
    return localExperts * size_t(shape.numRanks) * shape.maxTokens *
               receivedRowBytes(shape.hidden) +
           kLine;
  }
  // The least buffer for a shape, where a rank owns at most this many experts.
  static size_t bytesFor(const Shape& shape, size_t localExperts) {
    const size_t send = roundUp(sendNeed(shape, localExperts), kLine) + kLine;
    const size_t recv = roundUp(recvNeed(shape, localExperts), kLine) + kLine;
    return 2 * roundUp(std::max((send * 65 + 32) / 33, (recv * 65 + 31) / 32), kLine);
  }

 private:
  static constexpr size_t kLine = 128;
  size_t send_;
  size_t recv_;
};

// Most puts in which one rank pushes its rows. Each put has a word in the group's window.
inline constexpr size_t kMostPushes = 16;
inline constexpr size_t kPushBytes = kMostPushes * sizeof(uint64_t);
// Least bytes of a slot's payload in the group of a buffer, 0: as the group chooses. Up to 64 ranks
// there is room for a routing table of 4096 tokens with top-32, and for the rest of a slot's
// content.
constexpr size_t slotBytesFor(int numRanks) { return numRanks <= 64 ? size_t(1) << 20 : 0; }
inline constexpr size_t kMostPushedBytes = size_t(4) << 20;
// Bytes of one push, in whole rows: one push is copied while the next ones arrive. Cards push few
// pieces, because each costs an answer, which queues behind all traffic in the other direction.
inline size_t pushBytes(size_t bytes, size_t rowBytes, bool byCards) {
  const size_t leastBytes = size_t(byCards ? 1024 : 256) << 10;
  const size_t rows = bytes / rowBytes, least = std::max<size_t>(leastBytes / rowBytes, 1);
  return std::max((rows + kMostPushes - 1) / kMostPushes, least) * rowBytes;
}

// Size of a buffer if all ranks own about as many experts.
inline size_t sizeHint(const Shape& shape) {
  const auto experts = size_t(shape.numExperts), ranks = size_t(shape.numRanks);
  return BufferLayout::bytesFor(shape, (experts + ranks - 1) / ranks);
}

}  // namespace mooncake::ep
