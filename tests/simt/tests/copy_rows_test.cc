#include "kernels/copy_rows.cuh"

#include <gtest/gtest.h>
#include <vector>

#include "tests/simt/world.h"

namespace mooncake::simt {
namespace {

using kernels::CopyRowsArguments;

struct Case {
  std::vector<int32_t> counts;
  uint32_t blocksEach, rows;
  size_t rowBytes, offset;
};

// Copies with bytes that differ everywhere. Used rows arrive, and all other bytes stay.
void copyAndCheck(const Case& one, uint32_t grid, uint32_t threads, uint64_t seed) {
  const auto blocks = uint32_t(one.counts.size()) * one.blocksEach;
  const size_t blockBytes = one.rows * one.rowBytes, bytes = blocks * blockBytes;
  alignas(16) static unsigned char from[1 << 20], to[1 << 20];
  ASSERT_LE(bytes + one.offset, sizeof(from));
  for (size_t i = 0; i < bytes; ++i) {
    from[one.offset + i] = static_cast<unsigned char>(i * 7 + i / 251);
    to[one.offset + i] = static_cast<unsigned char>(~from[one.offset + i]);
  }
  const CopyRowsArguments arguments{.to = to + one.offset,
                                    .from = from + one.offset,
                                    .counts = one.counts.data(),
                                    .blocks = blocks,
                                    .blocksEach = one.blocksEach,
                                    .rows = one.rows,
                                    .rowBytes = one.rowBytes};
  World world({.seed = seed});
  world.launch(0, 0, "copy_rows", {grid}, {threads}, 0, [&] { mooncake_copy_rows(arguments); });
  const Report report = world.run();
  ASSERT_TRUE(report.ok) << report.problem;
  for (size_t i = 0; i < bytes; ++i) {
    const int32_t count = one.counts[i / blockBytes / one.blocksEach];
    const auto row = int64_t(i % blockBytes / one.rowBytes);
    const unsigned char source = from[one.offset + i];
    const unsigned expected = row < count ? source : static_cast<unsigned char>(~source);
    ASSERT_EQ(to[one.offset + i], expected) << "byte " << i << " of seed " << seed;
  }
}

TEST(CopyRowsTest, UsedRowsAreCopiedAndNoOthers) {
  const Case cases[] = {
      {{3, 0, 5, 1}, 1, 5, 48, 0},         // some
      {{2, 4}, 3, 4, 4, 0},                // several blocks of one count
      {{-1, 9, 2}, 1, 3, 10, 0},           // counts beyond the rows
      {{1, 2, 3}, 1, 3, 6, 2},             // no address is a multiple of four
      {{20, 0, 11}, 1, 20, 4096, 0},       // several chunks
      {{20, 0, 11}, 2, 20, 4096 - 12, 4},  // their ends do not fit the units
  };
  for (uint64_t seed = 1; seed <= 3; ++seed)
    for (const Case& one : cases)
      for (const uint32_t grid : {1U, 3U}) copyAndCheck(one, grid, 64, seed);
}

TEST(CopyRowsTest, MoreCountsThanAreKeptAtOnce) {
  Case many{{}, 1, 2, 8, 0};
  for (unsigned i = 0; i < 2 * kernels::kCountsAtOnce + 5; ++i)
    many.counts.push_back(int32_t(i % 3));
  for (uint64_t seed = 1; seed <= 5; ++seed) copyAndCheck(many, 2, 32, seed);
}

}  // namespace
}  // namespace mooncake::simt
