#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ep/rows.h"

// The memory of a buffer. Every offset of it is in this file.
//
//   send 0, send 1   read by the other ranks: the rows that an operation gives, and what comes for
//                    all of a host. Of operations with an even and with an odd number, as slots
//                    are (group/slot.h)
//                    dispatch: [n] rows of this rank's tokens, in sent form
//                              then, for each host that does not map us, the rows for it, packed
//                              then rows of ranks of other hosts: SharedRows
//                    combine:  [local expert][rank * T + place] rows that the experts made
//   recv 0, recv 1   what a dispatch returns, [local expert][rank * T + place] rows. Dispatches
//                    take turns: two results are alive at a time
//
// A row in sent form: bf16 as it is, or scales (float32) | e4m3 channels.
namespace mooncake::ep {

enum class RowFormat : uint8_t { kBf16 = 0, kFp8 = 1, kFp8Rounded = 2 };

constexpr size_t roundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// What a dispatch says of itself; the same on all ranks.
struct Shape {
  int numRanks = 1;
  int numExperts = 1;
  size_t maxTokens = 0;  // that a rank gives at most
  size_t hidden = 0;     // channels of a token
};

constexpr size_t bf16Bytes(size_t hidden) { return 2 * hidden; }
constexpr size_t scaleBytes(size_t hidden) { return sizeof(float) * scalesOf(hidden); }

// Of one row in sent form, and of one that an expert made.
inline size_t dispatchRowBytes(size_t hidden, RowFormat format) {
  return roundUp(format == RowFormat::kBf16 ? bf16Bytes(hidden) : scaleBytes(hidden) + hidden, 16);
}
inline size_t combineRowBytes(size_t hidden) {
  return roundUp(std::max(bf16Bytes(hidden), logfmtRowBytes(hidden)), 16);
}
// Of one row of what a dispatch returns, its scales included.
inline size_t receivedRowBytes(size_t hidden) {
  return std::max(bf16Bytes(hidden), hidden + scaleBytes(hidden));
}

// Sends hold rows that carry eight bytes for a block of 128 channels, results do not: 33 to 32.
class BufferLayout {
 public:
  explicit BufferLayout(size_t bytes)
      : send_(bytes / 2 * 33 / 65 / kLine * kLine), recv_((bytes / 2 - send_) / kLine * kLine) {}

  size_t sendBytes() const { return send_; }
  size_t recvBytes() const { return recv_; }
  size_t send(uint64_t number) const { return (number & 1) * send_; }
  size_t recv(uint64_t dispatch) const { return 2 * send_ + (dispatch & 1) * recv_; }

  // Where the rows of an expert fit, for as many experts as a rank owns.
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

// Rows that are pushed come in up to so many puts from one rank. Of each put there is a word, in
// the mailboxes of the group.
inline constexpr size_t kMostPushes = 16;
inline constexpr size_t kMailboxBytes = kMostPushes * sizeof(uint64_t);
inline constexpr size_t kMostPushedBytes = size_t(4) << 20;
// Whole rows; what has come is copied while the next ones come.
// Cards have few: each costs them an answer, which stands behind all that goes the other way.
inline size_t pushBytes(size_t bytes, size_t rowBytes, bool byCards) {
  const size_t leastBytes = size_t(byCards ? 1024 : 256) << 10;
  const size_t rows = bytes / rowBytes, least = std::max<size_t>(leastBytes / rowBytes, 1);
  return std::max((rows + kMostPushes - 1) / kMostPushes, least) * rowBytes;
}

// Where the ranks own about as many experts each.
inline size_t sizeHint(const Shape& shape) {
  const auto experts = size_t(shape.numExperts), ranks = size_t(shape.numRanks);
  return BufferLayout::bytesFor(shape, (experts + ranks - 1) / ranks);
}

}  // namespace mooncake::ep
