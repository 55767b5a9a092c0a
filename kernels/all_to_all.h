#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/collectives.h"

// The arguments of the kernel for all_to_all, and the table that each rank publishes for it.
namespace mooncake::kernels {

// The bytes that one rank sends to another. Each exchange publishes `step` of them at `place`.
struct Segment {
  uint64_t bytes;
  uint64_t place;  // offset behind the table
  uint64_t step;
};

// The first thing in a rank's memory in the first exchange. The other entries stay unwritten.
struct SplitTable {
  // Sums of splitHash() over the ranks that take part. Over all ranks they are equal exactly when
  // all splits fit each other.
  uint64_t sent, received;
  uint64_t exchanges;        // number of exchanges that the rank's input takes
  Segment to[kMaxRanks];     // by receiver
  uint64_t from[kMaxRanks];  // bytes that the rank expects, by sender
};

constexpr size_t kSegmentUnit = 16;  // bytes: segments lie at multiples of it
constexpr size_t kTableBytes = (sizeof(SplitTable) + 127) / 128 * 128;
// A bank that is larger than an input by `kSplitBytes` takes it in one exchange.
constexpr size_t kSplitBytes = kTableBytes + 2 * kMaxRanks * kSegmentUnit;

// all_to_all. A rank knows only its own splits, so the table tells the other ranks how many
// exchanges the operation has, and `exchange.pieces` is 1. A rank that has signalled the second
// exchange has read the tables: a block that goes on for stopped ones finds all signals that they
// have found. `exchange.inputCount` segments, by receiver; one: all ranks receive it.
struct AllToAllArguments {
  Exchange exchange;
  uint64_t exchanges;  // see SplitTable
  Segment to[kMaxRanks];
  uint64_t from[kMaxRanks];
  unsigned char* outputs[kMaxRanks];
};

// Lays out `count` segments of these sizes for banks of `bankBytes`: more than kSplitBytes. Each
// exchange has the same part of all segments, so all receivers read in each.
inline void layOutSegments(AllToAllArguments& arguments, const size_t* sizes, unsigned count,
                           size_t bankBytes) {
  const auto unitsOf = [](uint64_t bytes) { return (bytes + kSegmentUnit - 1) / kSegmentUnit; };
  // A part is rounded up to a whole unit, and its place is rounded down.
  const uint64_t room = (bankBytes - kTableBytes) / kSegmentUnit - count;
  uint64_t units = 0, before = 0;
  for (unsigned i = 0; i < count; ++i) units += unitsOf(sizes[i]);
  const uint64_t exchanges = units ? (units - 1) / room + 1 : 1;
  for (unsigned i = 0; i < count; ++i) {
    const uint64_t own = unitsOf(sizes[i]);
    arguments.to[i] = {sizes[i], (before / exchanges + i) * kSegmentUnit,
                       (own + exchanges - 1) / exchanges * kSegmentUnit};
    before += own;
  }
  for (unsigned i = count; i < unsigned(kMaxRanks); ++i) arguments.to[i] = arguments.to[0];
  arguments.exchanges = exchanges;
  arguments.exchange.pieces = 1;
  arguments.exchange.inputCount = count;
  arguments.exchange.readers = count == 1 ? Readers::kAll : Readers::kOwnPart;
}

}  // namespace mooncake::kernels
