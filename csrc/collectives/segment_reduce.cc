#include "collectives/segment_reduce.h"

#include <algorithm>
#include <deque>

#include "base/failpoint.h"
#include "collectives/buffers.h"
#include "group/fetches.h"

namespace mooncake {
namespace {

// Chunks of all sources together fit half of a second-level cache of 1 MiB. A chunk is long enough
// that a system call per source and chunk does not matter.
constexpr size_t kCacheBudget = 512 << 10;
constexpr size_t kLeastChunk = 16 << 10;
constexpr size_t kMostChunk = 128 << 10;
// On message transports a chunk must cover a round trip instead.
constexpr size_t kMessageChunk = 256 << 10;
constexpr int kMessageDepth = 4;
// Over network cards, chunks must cover a round trip on each of several cards.
constexpr size_t kLeastCardChunk = 64 << 10;
constexpr size_t kMostCardChunk = 512 << 10;
constexpr int kCardDepth = 8;
constexpr size_t kCardBudget = 32 << 20;

size_t roundDown(size_t bytes) { return bytes & ~size_t(4095); }

// A part of one segment that is fetched and reduced at once. Short segments share a chunk.
struct Piece {
  const Segment* segment;
  size_t start;  // offset in the segment
  size_t bytes;
  size_t place;  // offset in the chunk's scratch memory
};
using Chunk = std::vector<Piece>;

std::vector<Chunk> chunksOf(std::span<const Segment> segments, size_t most) {
  std::vector<Chunk> chunks;
  size_t used = most;
  for (const Segment& segment : segments) {
    for (size_t start = 0; start < segment.target.size();) {
      if (used == most) {
        chunks.emplace_back();
        used = 0;
      }
      const size_t bytes = std::min(most - used, segment.target.size() - start);
      chunks.back().push_back({&segment, start, bytes, used});
      start += bytes;
      used = std::min(most, aligned(used + bytes));
    }
  }
  return chunks;
}

}  // namespace

Status reduceSegments(Operation& op, std::span<const Segment> segments, size_t buffers,
                      const std::function<Status()>& whileFetching) {
  const auto& ranks = op.ranks();
  const size_t size = ranks.size();
  const size_t self = size_t(std::ranges::lower_bound(ranks, op.rank()) - ranks.begin());
  const bool mapped = op.group().window().fullyMapped();
  const bool byCards = op.group().usesCards();
  const size_t chunk = mapped ? std::clamp(roundDown(kCacheBudget / size), kLeastChunk, kMostChunk)
                       : byCards ? std::clamp(roundDown(kCardBudget / (kCardDepth * size)),
                                              kLeastCardChunk, kMostCardChunk)
                                 : kMessageChunk;
  const size_t depth = mapped ? 1 : byCards ? kCardDepth : kMessageDepth;
  auto scratch = op.group().scratch(depth * size * chunk);
  if (!scratch.ok()) return scratch.error();

  const auto place = [&](size_t index, size_t part, const Piece& piece) {
    return *scratch + ((index % depth) * size + part) * chunk + piece.place;
  };
  const std::vector<Chunk> chunks = chunksOf(segments, chunk);
  std::deque<Fetches> underWay;
  size_t started = 0;
  const auto startUpTo = [&](size_t end) -> Status {
    for (; started < std::min(end, chunks.size()); ++started) {
      Fetches& fetches = underWay.emplace_back(op);
      for (size_t step = 1; step < size; ++step) {
        const size_t from = (self + step) % size;
        for (const Piece& piece : chunks[started]) {
          auto buffer = announcedBuffer(op, ranks[from], piece.segment->buffer, buffers);
          if (!buffer.ok()) return buffer.error();
          MOONCAKE_TRY(fetches.start(ranks[from], *buffer, piece.segment->offset + piece.start,
                                     {place(started, from, piece), piece.bytes}));
        }
      }
    }
    return {};
  };
  const auto sources = op.group().sources().first(size);
  MOONCAKE_TRY(startUpTo(depth));
  MOONCAKE_TRY(whileFetching());
  for (size_t index = 0; index < chunks.size(); ++index) {
    failpoint("reduce-chunk");
    MOONCAKE_TRY(op.goOn());
    MOONCAKE_TRY(startUpTo(index + depth));
    MOONCAKE_TRY(underWay.front().await());
    underWay.pop_front();
    for (const Piece& piece : chunks[index]) {
      const Segment& segment = *piece.segment;
      for (size_t part = 0; part < size; ++part)
        sources[part] = part == self ? segment.own + piece.start : place(index, part, piece);
      std::byte* const target = segment.target.data() + piece.start;
      std::byte* const sum = segment.isForPeers ? place(index, self, piece) : target;
      reduceSources(segment.reduction, sum, sources,
                    piece.bytes / dtypeSize(segment.reduction.dtype));
      if (segment.isForPeers) copyForPeers(target, {sum, piece.bytes});
    }
  }
  return {};
}

}  // namespace mooncake
