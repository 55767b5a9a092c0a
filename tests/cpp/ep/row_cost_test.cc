#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <vector>

#include "ep/rows.h"
#include "kernels/common/bf16.h"

// Measures the speed of the row functions. For the table:
// --gtest_also_run_disabled_tests --gtest_filter=RowCost.*
namespace mooncake::ep {
namespace {

constexpr size_t kHidden = 7168, kTokens = 512, kTopK = 8;
constexpr size_t kRowBytes = kHidden * 2;

// Returns GB read and written per second: the best of several passes, without the first one.
template <typename Pass>
double speed(size_t bytes, const Pass& pass) {
  pass();
  double best = 0;
  for (int i = 0; i < 15; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pass();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, double(bytes) / took.count());
  }
  return best;
}

TEST(RowCost, DISABLED_Table) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> rows(kTokens * kTopK * kHidden);
  for (uint16_t& value : rows) value = floatToBf16(normal(random));
  std::vector<uint16_t> out(rows.size());
  std::vector<float> scales(kTokens * scalesOf(kHidden));
  std::vector<WeightedRow> weighted(kTokens * kTopK), encoded(kTokens * kTopK);
  std::vector<std::byte> coded(kTokens * kTopK * logfmtRowBytes(kHidden));
  size_t codedBytes = 0;
  for (size_t r = 0; r < weighted.size(); ++r) {
    weighted[r] = {rows.data() + r * kHidden, 0.125f + 0.01f * float(r % 7)};
    encoded[r] = {coded.data() + r * logfmtRowBytes(kHidden), weighted[r].weight};
    codedBytes += encodeLogfmtRow(rows.data() + r * kHidden, kHidden,
                                  coded.data() + r * logfmtRowBytes(kHidden));
  }

  // One token, again and again, stays in the first caches. 512 tokens exceed them.
  std::printf("%-9s %-16s | %10s %10s %10s\n", "version", "", "1 token", "512 tokens", "memcpy");
  const auto line = [&](const char* version, const char* what, size_t bytesOfToken,
                        const auto& token) {
    const auto repeated = [&](size_t tokens) {
      return speed(kTokens * bytesOfToken, [&] {
        for (size_t t = 0; t < kTokens; ++t) token(t % tokens);
      });
    };
    const auto copy = speed(kTokens * bytesOfToken, [&] {
      for (size_t t = 0; t < kTokens; ++t)
        std::memcpy(reinterpret_cast<std::byte*>(out.data()) + t * bytesOfToken / 2,
                    reinterpret_cast<std::byte*>(rows.data()) + t * bytesOfToken / 2,
                    bytesOfToken / 2);
    });
    std::printf("%-9s %-16s | %10.1f %10.1f %10.1f\n", version, what, repeated(1),
                repeated(kTokens), copy);
  };
  for (const Isa isa : availableIsas()) {
    const RowFunctions& functions = rowsOf(isa);
    const char* name = isaName(isa);
    line(name, "castRowToFp8", kRowBytes + kHidden, [&](size_t t) {
      functions.castRowToFp8(rows.data() + t * kHidden, kHidden, false,
                             reinterpret_cast<uint8_t*>(out.data()) + t * kHidden,
                             scales.data() + t * scalesOf(kHidden));
    });
    line(name, "streamRow", 2 * kRowBytes, [&](size_t t) {
      functions.streamRow(out.data() + t * kHidden, rows.data() + t * kHidden, kRowBytes);
    });
    line(name, "combineRows", (kTopK + 1) * kRowBytes, [&](size_t t) {
      functions.combineRows({weighted.data() + t * kTopK, kTopK}, kHidden,
                            out.data() + t * kHidden);
    });
    line(name, "encodeLogfmtRow", kRowBytes + codedBytes / weighted.size(), [&](size_t t) {
      functions.encodeLogfmtRow(rows.data() + t * kHidden, kHidden,
                                coded.data() + t * logfmtRowBytes(kHidden));
    });
    line(name, "combineLogfmt", codedBytes / kTokens + kRowBytes, [&](size_t t) {
      functions.combineLogfmtRows({encoded.data() + t * kTopK, kTopK}, kHidden,
                                  out.data() + t * kHidden);
    });
  }
}

}  // namespace
}  // namespace mooncake::ep
