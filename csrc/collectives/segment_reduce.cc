#include "collectives/segment_reduce.h"

#include <algorithm>
#include <deque>

namespace mooncake {
namespace {

// Chunks of all sources together fit half of a second-level cache of 1 MiB; a chunk is long enough
// that a system call per source and chunk does not matter.
constexpr size_t kCacheBudget = 512 << 10;
constexpr size_t kLeastChunk = 16 << 10;
constexpr size_t kMostChunk = 128 << 10;
// On message transports a chunk must cover a round trip instead.
constexpr size_t kMessageChunk = 256 << 10;
constexpr int kMessageDepth = 4;

size_t roundDown(size_t bytes) { return bytes & ~size_t(4095); }

}  // namespace

Status reduceSegment(Operation& op, Reduction reduction, std::span<const std::byte> own,
                     uint64_t offset, std::span<std::byte> target,
                     const std::function<Status()>& whileFetching) {
  const int size = op.size(), rank = op.rank();
  const bool mapped = op.group().window().fullyMapped();
  const size_t chunk =
      mapped ? std::clamp(roundDown(kCacheBudget / size_t(size)), kLeastChunk, kMostChunk)
             : kMessageChunk;
  const size_t depth = mapped ? 1 : kMessageDepth;
  auto scratch = op.group().scratch(depth * size_t(size) * chunk);
  if (!scratch.ok()) return op.fail(scratch.error());

  const auto place = [&](size_t index, int r) {
    return *scratch + ((index % depth) * size_t(size) + size_t(r)) * chunk;
  };
  const size_t chunks = (target.size() + chunk - 1) / chunk;
  const auto lengthOf = [&](size_t index) {
    return std::min(chunk, target.size() - index * chunk);
  };

  std::deque<Fetches> underWay;
  size_t started = 0;
  const auto startUpTo = [&](size_t end) -> Status {
    for (; started < std::min(end, chunks); ++started) {
      Fetches& fetches = underWay.emplace_back(op);
      for (int step = 1; step < size; ++step) {
        const int from = (rank + step) % size;
        MOONCAKE_TRY(fetches.start(from, op.slot(from).input, offset + started * chunk,
                                   {place(started, from), lengthOf(started)}));
      }
    }
    return {};
  };
  const auto sources = op.group().sources();
  MOONCAKE_TRY(startUpTo(depth));
  MOONCAKE_TRY(whileFetching());
  for (size_t index = 0; index < chunks; ++index) {
    MOONCAKE_TRY(startUpTo(index + depth));
    MOONCAKE_TRY(underWay.front().await());
    underWay.pop_front();
    for (int r = 0; r < size; ++r)
      sources[r] = r == rank ? own.data() + index * chunk : place(index, r);
    reduceSources(reduction, target.data() + index * chunk, sources,
                  lengthOf(index) / dtypeSize(reduction.dtype));
  }
  return {};
}

}  // namespace mooncake
