#include "collectives/segment_reduce.h"

#include <algorithm>
#include <deque>

#include "base/failpoint.h"

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
  const auto& ranks = op.ranks();
  const size_t size = ranks.size();
  const size_t self = size_t(std::ranges::lower_bound(ranks, op.rank()) - ranks.begin());
  const bool mapped = op.group().window().fullyMapped();
  const size_t chunk =
      mapped ? std::clamp(roundDown(kCacheBudget / size), kLeastChunk, kMostChunk) : kMessageChunk;
  const size_t depth = mapped ? 1 : kMessageDepth;
  auto scratch = op.group().scratch(depth * size * chunk);
  if (!scratch.ok()) return scratch.error();

  const auto place = [&](size_t index, size_t part) {
    return *scratch + ((index % depth) * size + part) * chunk;
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
      for (size_t step = 1; step < size; ++step) {
        const size_t from = (self + step) % size;
        MOONCAKE_TRY(fetches.start(ranks[from], op.slot(ranks[from]).input,
                                   offset + started * chunk,
                                   {place(started, from), lengthOf(started)}));
      }
    }
    return {};
  };
  const auto sources = op.group().sources().first(size);
  MOONCAKE_TRY(startUpTo(depth));
  MOONCAKE_TRY(whileFetching());
  for (size_t index = 0; index < chunks; ++index) {
    failpoint("reduce-chunk");
    MOONCAKE_TRY(op.goOn());
    MOONCAKE_TRY(startUpTo(index + depth));
    MOONCAKE_TRY(underWay.front().await());
    underWay.pop_front();
    for (size_t part = 0; part < size; ++part)
      sources[part] = part == self ? own.data() + index * chunk : place(index, part);
    reduceSources(reduction, target.data() + index * chunk, sources,
                  lengthOf(index) / dtypeSize(reduction.dtype));
  }
  return {};
}

}  // namespace mooncake
