#pragma once

#include "kernels/collectives.h"
#include "kernels/device.h"

// How the data of an operation are cut: into pieces for exchanges, and each into parts for blocks.
namespace mooncake::kernels {

// The part of a block: [begin, end) of `count`.
struct Part {
  size_t begin, end;
};
MC_DEVICE Part partOf(size_t count, unsigned block, unsigned blocks, size_t unit) {
  const size_t units = (count + unit - 1) / unit;
  const size_t begin = units * block / blocks * unit, end = units * (block + 1) / blocks * unit;
  return {begin < count ? begin : count, end < count ? end : count};
}

MC_DEVICE Part commonOf(const Part& a, const Part& b) {
  const size_t begin = a.begin > b.begin ? a.begin : b.begin, end = a.end < b.end ? a.end : b.end;
  return {begin, begin < end ? end : begin};
}

// Bytes: parts of blocks begin at multiples of it.
constexpr size_t kPartBytes = 1024;

MC_DEVICE int countOf(uint64_t ranks) {
  int count = 0;
  for (; ranks; ranks &= ranks - 1) ++count;
  return count;
}

// Bytes: segments of ranks begin at multiples of it. Units of memory accesses of a GPU.
constexpr size_t kSegmentBytes = 128;

// The segment of a rank that takes part: [begin, end) of a piece of `bytes`.
MC_DEVICE Part segmentOf(uint64_t active, int rank, size_t bytes) {
  const int before = countOf(active & ((uint64_t(1) << rank) - 1));
  return partOf(bytes, unsigned(before), unsigned(countOf(active)), kSegmentBytes);
}

// A piece of `bytes`.
MC_DEVICE Part pieceOf(const Exchange& exchange, unsigned piece, size_t bytes) {
  const size_t begin = piece * exchange.piece, end = begin + exchange.piece;
  return {begin < bytes ? begin : bytes, end < bytes ? end : bytes};
}

// Number of the operation's exchanges.
MC_DEVICE unsigned exchangesOf(const Exchange& exchange) {
  return exchange.isTwoShot ? 2 * exchange.pieces : exchange.pieces;
}

// One exchange of an operation.
struct Turn {
  uint64_t serial;
  unsigned number;                       // from 0 on
  uint64_t active;                       // bits of the ranks that take part
  unsigned exchanges = 1;                // of the operation; see AllToAllArguments
  unsigned char* const* data = nullptr;  // of the ranks that take part, where this rank reads them
};

MC_DEVICE Turn after(Turn turn) {
  ++turn.serial;
  ++turn.number;
  return turn;
}

// The piece of `bytes` that an exchange has.
MC_DEVICE Part pieceOf(const Exchange& exchange, const Turn& turn, size_t bytes) {
  return pieceOf(exchange, exchange.isTwoShot ? turn.number / 2 : turn.number, bytes);
}

// Whether an exchange gathers the segments that the one before has reduced.
MC_DEVICE bool gathersSegments(const Exchange& exchange, const Turn& turn) {
  return exchange.isTwoShot && turn.number % 2;
}

// Whether all ranks read the same data of a rank in an exchange.
MC_DEVICE bool areForAll(const Exchange& exchange, const Turn& turn) {
  return exchange.isTwoShot ? gathersSegments(exchange, turn) : exchange.readers == Readers::kAll;
}

// Whether an exchange is published before the data of the one before it are used. Segments are not:
// they come of these data.
MC_DEVICE bool isAhead(const Exchange& exchange, const Turn& turn) {
  return exchange.state->banks == kMostBanks && turn.number < turn.exchanges &&
         !gathersSegments(exchange, turn);
}

// Serial number of the operation's last exchange.
MC_DEVICE uint64_t lastSerial(const Turn& turn) {
  return turn.serial - turn.number + turn.exchanges - 1;
}

}  // namespace mooncake::kernels
