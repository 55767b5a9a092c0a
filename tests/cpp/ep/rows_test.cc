#include "ep/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <vector>

#include "kernels/common/fp8.h"
#include "kernels/common/logfmt.h"

// Compares every version of the row functions with the definitions in kernels/common.
namespace mooncake::ep {
namespace {

using Row = std::vector<uint16_t>;
using Buffer = std::vector<std::byte>;

constexpr size_t kHiddens[] = {1, 7, 127, 128, 129, 1000, 7168};
constexpr std::byte kGuard{0xa5};
constexpr size_t kGuards = 64;

// Kinds of rows: those that models pass, and those that they should not pass.
enum class Kind { kNormal, kWide, kTiny, kZeros, kSpecial, kAnyBits };
constexpr Kind kKinds[] = {Kind::kNormal, Kind::kWide,    Kind::kTiny,
                           Kind::kZeros,  Kind::kSpecial, Kind::kAnyBits};

uint16_t valueOf(Kind kind, std::mt19937& random) {
  constexpr uint16_t kSpecials[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x7f7f, 0xff7f,
                                    0x7f80, 0xff80, 0x7f81, 0x7fc0, 0xffff, 0x3f80, 0xbf80, 0x3f81};
  std::normal_distribution<float> normal;
  switch (kind) {
    case Kind::kNormal:
      return floatToBf16(normal(random));
    case Kind::kWide:
      return floatToBf16(std::ldexp(normal(random), int(random() % 121) - 60));
    case Kind::kTiny:
      return floatToBf16(std::ldexp(normal(random), -128));
    case Kind::kZeros:
      return random() % 2 ? 0x8000 : 0;
    case Kind::kSpecial:
      return kSpecials[random() % std::size(kSpecials)];
    case Kind::kAnyBits:
      return uint16_t(random());
  }
  return 0;
}

Row rowOf(Kind kind, size_t hidden, unsigned seed) {
  std::mt19937 random(seed);
  Row row(hidden);
  for (uint16_t& value : row) value = valueOf(kind, random);
  return row;
}

// Memory of `bytes` that starts at an odd place and is guarded behind its end.
class Guarded {
 public:
  explicit Guarded(size_t bytes, size_t shift = 2)
      : memory_(shift + bytes + kGuards, kGuard), shift_(shift), bytes_(bytes) {}
  ~Guarded() {
    for (size_t i = shift_ + bytes_; i < memory_.size(); ++i)
      EXPECT_EQ(memory_[i], kGuard) << "written behind the end";
  }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(memory_.data() + shift_);
  }
  Buffer bytes() const {
    return Buffer(memory_.begin() + long(shift_), memory_.begin() + long(shift_ + bytes_));
  }

 private:
  Buffer memory_;
  size_t shift_, bytes_;
};

template <typename T>
Buffer bytesOf(const std::vector<T>& values) {
  const auto* start = reinterpret_cast<const std::byte*>(values.data());
  return Buffer(start, start + values.size() * sizeof(T));
}

class RowsTest : public testing::TestWithParam<Isa> {
 protected:
  const RowFunctions& rows = rowsOf(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Isas, RowsTest, testing::ValuesIn(availableIsas()),
                         [](const auto& info) { return isaName(info.param); });

// ---- FP8

struct Fp8Row {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

Fp8Row definedFp8(const Row& row, bool roundScale) {
  Fp8Row result{std::vector<uint8_t>(row.size()), {}};
  for (size_t begin = 0; begin < row.size(); begin += kBlock) {
    const size_t end = std::min(row.size(), begin + kBlock);
    uint16_t amax = 0;
    for (size_t i = begin; i < end; ++i) amax = largerMagnitude(amax, row[i]);
    const Fp8Scale scale = fp8Scale(bf16ToFloat(amax), roundScale);
    for (size_t i = begin; i < end; ++i) result.codes[i] = castToE4m3(row[i], scale);
    result.scales.push_back(scale.scale);
  }
  return result;
}

void expectFp8AsDefined(const RowFunctions& rows, const Row& row) {
  for (const bool roundScale : {false, true}) {
    const Fp8Row defined = definedFp8(row, roundScale);
    Guarded codes(row.size(), 1), scales(scalesOf(row.size()) * sizeof(float), 4);
    rows.castRowToFp8(row.data(), row.size(), roundScale, codes.as<uint8_t>(), scales.as<float>());
    ASSERT_EQ(codes.bytes(), bytesOf(defined.codes));
    ASSERT_EQ(scales.bytes(), bytesOf(defined.scales));
  }
}

TEST_P(RowsTest, CastsEveryKindOfRowAsDefined) {
  for (const size_t hidden : kHiddens)
    for (const Kind kind : kKinds) expectFp8AsDefined(rows, rowOf(kind, hidden, unsigned(hidden)));
}

// For largest values with different mantissas, all values of the 19 octaves below. That is more
// than FP8 can distinguish.
TEST_P(RowsTest, CastsEveryValueAsDefined) {
  for (uint16_t largest = 0x3f80; largest < 0x4000; largest += 5) {
    Row row;
    for (int value = largest; value > largest - 19 * 128; --value) {
      for (const int sign : {0, 0x8000}) {
        if (row.size() % kBlock == 0) row.push_back(largest);
        row.push_back(uint16_t(value | sign));
      }
    }
    ASSERT_NO_FATAL_FAILURE(expectFp8AsDefined(rows, row));
  }
}

TEST_P(RowsTest, CastsBlocksWithAnInfinityAsDefined) {
  for (const size_t at : {0, 127, 130}) {
    Row row = rowOf(Kind::kNormal, 3 * kBlock, 1);
    row[at] = at % 2 ? 0xff80 : 0x7f80;
    ASSERT_EQ(definedFp8(row, false).codes[at], at % 2 ? 0xff : 0x7f);
    ASSERT_NO_FATAL_FAILURE(expectFp8AsDefined(rows, row));
  }
}

TEST_P(RowsTest, ANanIsNotItsNeighboursAffair) {
  Row row = rowOf(Kind::kNormal, kBlock, 1);
  row[5] = 0xffc0;
  std::vector<uint8_t> codes(kBlock);
  float scale = 0;
  rows.castRowToFp8(row.data(), row.size(), false, codes.data(), &scale);
  for (size_t i = 0; i < kBlock; ++i) EXPECT_EQ((codes[i] & 0x7f) == 0x7f, i == 5);
  EXPECT_TRUE(std::isfinite(scale));
}

// ---- the weighted sum

std::vector<float> weightsOf(size_t count) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform;
  std::vector<float> weights(count);
  for (float& weight : weights) weight = uniform(random);
  if (count > 4) weights[4] = 0;
  if (count > 5) weights[5] = -1.5f;
  return weights;
}

TEST_P(RowsTest, CombinesEveryKindOfRowAsDefined) {
  for (const size_t hidden : kHiddens) {
    for (const Kind kind : kKinds) {
      for (const size_t count : {0, 1, 2, 8, 17}) {
        std::vector<Row> data;
        std::vector<WeightedRow> weighted;
        const auto weights = weightsOf(count);
        for (size_t r = 0; r < count; ++r) data.push_back(rowOf(kind, hidden, unsigned(r)));
        for (size_t r = 0; r < count; ++r) weighted.push_back({data[r].data(), weights[r]});
        Row defined(hidden);
        for (size_t i = 0; i < hidden; ++i) {
          float sum = 0;
          for (size_t r = 0; r < count; ++r)
            sum = std::fma(bf16ToFloat(data[r][i]), weights[r], sum);
          defined[i] = floatToBf16(sum);
        }
        Guarded out(hidden * 2);
        rows.combineRows(weighted, hidden, out.as<uint16_t>());
        ASSERT_EQ(out.bytes(), bytesOf(defined)) << hidden << " channels, " << count << " rows";
      }
    }
  }
}

// ---- LogFMT

LogfmtHeader definedHeader(const uint16_t* block, size_t channels) {
  uint16_t largest = 0, smallest = 0xffff;
  for (size_t i = 0; i < channels; ++i) {
    const uint16_t magnitude = bf16Magnitude(block[i]);
    largest = std::max(largest, magnitude);
    if (magnitude != 0) smallest = std::min(smallest, magnitude);
  }
  return channels == kBlock ? logfmtHeader(largest, smallest) : LogfmtHeader{0, 0};
}

unsigned bitOf(const std::byte* plane, size_t i) { return (unsigned(plane[i / 8]) >> (i % 8)) & 1; }

void expectLogfmtAsDefined(const RowFunctions& rows, const Row& row) {
  Guarded coded(logfmtRowBytes(row.size()), 0);
  const auto* start = coded.as<std::byte>();
  const size_t bytes = rows.encodeLogfmtRow(row.data(), row.size(), coded.as<std::byte>());
  ASSERT_EQ(bytes, logfmtEncodedBytes(start, row.size()));
  const auto* block = start + logfmtPrefixBytes(row.size());
  for (size_t begin = 0; begin < row.size(); begin += kBlock) {
    const size_t channels = std::min(kBlock, row.size() - begin);
    const LogfmtHeader defined = definedHeader(&row[begin], channels);
    LogfmtHeader header;
    std::memcpy(&header, start + begin / kBlock * 4, 4);
    ASSERT_EQ(header.largest, defined.largest);
    ASSERT_EQ(header.step, defined.step);
    for (size_t i = 0; i < channels; ++i) {
      const uint16_t value = row[begin + i];
      if (header.step == 0) {
        ASSERT_EQ(std::memcmp(block + 2 * i, &value, 2), 0);
        continue;
      }
      ASSERT_EQ(unsigned(block[i]) | bitOf(block + kLogfmtNinthBits, i) << 8,
                logfmtCode(bf16Magnitude(value), header));
      ASSERT_EQ(bitOf(block + kLogfmtSigns, i), value >> 15);
    }
    block += logfmtBlockBytes(header, uint32_t(channels));
  }
  ASSERT_EQ(block, start + bytes);
}

TEST_P(RowsTest, EncodesEveryKindOfRowAsDefined) {
  for (const size_t hidden : kHiddens)
    for (const Kind kind : kKinds)
      ASSERT_NO_FATAL_FAILURE(expectLogfmtAsDefined(rows, rowOf(kind, hidden, unsigned(hidden))));
}

TEST_P(RowsTest, EncodesEveryMagnitudeAsDefined) {
  for (const uint16_t largest : {0x1f80, 0x3f80, 0x3fff, 0x4b11, 0x7f7f}) {
    for (const int octaves : {0, 1, 2, 3, 8, 32}) {
      const int smallest = largest - octaves * 128 - octaves % 3;
      // Below 32 octaves everything goes to zero or to the first code.
      Row row;
      for (int value = largest; value >= std::max(1, smallest - octaves / 32 * 512); --value) {
        if (row.size() % kBlock == 0) row.insert(row.end(), {largest, uint16_t(smallest)});
        row.push_back(uint16_t(value | (value % 3 == 0 ? 0x8000 : 0)));
      }
      row.resize(scalesOf(row.size()) * kBlock, largest);
      ASSERT_NO_FATAL_FAILURE(expectLogfmtAsDefined(rows, row));
    }
  }
}

// A magnitude exactly between two codes is rare.
TEST_P(RowsTest, TheLowerOfTwoCodesAsNearIsTaken) {
  struct Tie {
    uint16_t smallest, middle, lower;
  };
  for (const Tie tie : {Tie{0x3eeb, 0x3f20, 203}, Tie{0x3cfe, 0x3e8a, 318}, {0x2fb1, 0x3115, 45}}) {
    Row row(kBlock, 0x3f80);
    row[0] = tie.smallest;
    row[1] = tie.middle;
    Buffer coded(logfmtRowBytes(kBlock));
    rows.encodeLogfmtRow(row.data(), kBlock, coded.data());
    const std::byte* block = coded.data() + logfmtPrefixBytes(kBlock);
    EXPECT_EQ(unsigned(block[1]) | bitOf(block + kLogfmtNinthBits, 1) << 8, tie.lower);
  }
}

// A row of LogFMT, as floats.
std::vector<float> decoded(const Row& row) {
  std::vector<float> values;
  for (size_t i = 0; i < row.size(); ++i) {
    const size_t begin = i / kBlock * kBlock;
    const LogfmtHeader header = definedHeader(&row[begin], std::min(kBlock, row.size() - begin));
    if (header.step == 0) {
      values.push_back(bf16ToFloat(row[i]));
    } else {
      const float magnitude = logfmtMagnitude(logfmtCode(bf16Magnitude(row[i]), header), header);
      values.push_back(row[i] >> 15 ? -magnitude : magnitude);
    }
  }
  return values;
}

TEST_P(RowsTest, CombinesEncodedRowsAsDefined) {
  for (const size_t hidden : kHiddens) {
    for (const Kind kind : kKinds) {
      for (const size_t count : {0, 1, 8, 17}) {
        std::vector<std::vector<float>> values;
        std::vector<Buffer> coded(count, Buffer(logfmtRowBytes(hidden)));
        std::vector<WeightedRow> weighted;
        const auto weights = weightsOf(count);
        for (size_t r = 0; r < count; ++r) {
          // Rows of two kinds, so that coded and raw blocks are mixed.
          const Row row = rowOf(r % 3 == 1 ? Kind::kNormal : kind, hidden, unsigned(r));
          values.push_back(decoded(row));
          rows.encodeLogfmtRow(row.data(), hidden, coded[r].data());
          weighted.push_back({coded[r].data(), weights[r]});
        }
        Row defined(hidden);
        for (size_t i = 0; i < hidden; ++i) {
          float sum = 0;
          for (size_t r = 0; r < count; ++r) sum = std::fma(values[r][i], weights[r], sum);
          defined[i] = floatToBf16(sum);
        }
        Guarded out(hidden * 2);
        rows.combineLogfmtRows(weighted, hidden, out.as<uint16_t>());
        ASSERT_EQ(out.bytes(), bytesOf(defined)) << hidden << " channels, " << count << " rows";
      }
    }
  }
}

TEST_P(RowsTest, HeadersThatAreGarbageLeadNowhere) {
  constexpr size_t kHidden = kBlock + 1;
  Guarded garbage(logfmtRowBytes(kHidden), 0);
  std::memset(garbage.as<void>(), 0x11, logfmtRowBytes(kHidden));
  EXPECT_LE(logfmtEncodedBytes(garbage.as<std::byte>(), kHidden), logfmtRowBytes(kHidden));
  Row out(kHidden);
  const WeightedRow weighted{garbage.as<void>(), 1};
  rows.combineLogfmtRows({&weighted, 1}, kHidden, out.data());
  EXPECT_EQ(out[kBlock], 0x1111) << "a short block is raw, whatever its header says";
}

TEST_P(RowsTest, LogfmtLosesLittleAndSavesAThird) {
  const Row row = rowOf(Kind::kNormal, 7168, 1);
  Buffer coded(logfmtRowBytes(row.size()));
  EXPECT_EQ(rows.encodeLogfmtRow(row.data(), row.size(), coded.data()), 56u * (160 + 4));
  const WeightedRow weighted{coded.data(), 1};
  Row back(row.size());
  rows.combineLogfmtRows({&weighted, 1}, row.size(), back.data());
  double products = 0, squares = 0, sum = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    const double x = bf16ToFloat(row[i]), y = bf16ToFloat(back[i]);
    products += x * y;
    squares += x * x + y * y;
    sum += std::abs(y) - std::abs(x);
  }
  EXPECT_LT(1 - 2 * products / squares, 2e-5);
  EXPECT_LT(std::abs(sum) / double(row.size()), 1e-4) << "magnitudes shrink or grow on average";
}

// ---- copies

TEST_P(RowsTest, StreamsAnyBytesToAnyPlace) {
  std::mt19937 random(1);
  Buffer from(1000);
  for (std::byte& value : from) value = std::byte(random());
  for (size_t bytes = 0; bytes < 300; ++bytes) {
    for (size_t shift = 0; shift < 65; shift += 1 + bytes % 7) {
      Guarded to(bytes, shift);
      rows.streamRow(to.as<void>(), from.data() + shift % 9, bytes);
      ASSERT_EQ(to.bytes(),
                Buffer(from.begin() + long(shift % 9), from.begin() + long(shift % 9 + bytes)));
    }
  }
}

TEST(Rows, EachRankHasAShareOfItsCache) {
  constexpr size_t kCache = size_t(32) << 20;
  const CpuCache all{kCache, 0}, pair{kCache, 2}, eight{kCache, 8};
  EXPECT_EQ(shareOfCache(pair, 2, 1), kCache / 2);
  EXPECT_EQ(shareOfCache(pair, 2, 2), kCache / 2);
  EXPECT_EQ(shareOfCache(pair, 2, 4), kCache / 4);
  EXPECT_EQ(shareOfCache(all, 64, 8), kCache / 8);     // one cache for all cores
  EXPECT_EQ(shareOfCache(eight, 64, 8), kCache / 2);   // one for each rank
  EXPECT_EQ(shareOfCache(eight, 64, 20), kCache / 3);  // two or three ranks for each cache
  EXPECT_EQ(shareOfCache(eight, 4, 4), kCache / 4);    // of its cores we have but these
}

TEST(Rows, EveryHintCopies) {
  const Row row = rowOf(Kind::kAnyBits, 100'000, 1);
  EXPECT_EQ(copyHint(1, 2), CopyHint::kCached);
  EXPECT_EQ(copyHint(size_t(1) << 40, 2), CopyHint::kStreamed);
  for (const CopyHint hint : {CopyHint::kCached, CopyHint::kStreamed}) {
    for (const size_t bytes : {size_t(0), size_t(1), size_t(14336), row.size() * 2}) {
      Guarded to(bytes);
      copyRow(to.as<void>(), row.data(), bytes, hint);
      EXPECT_EQ(std::memcmp(to.as<void>(), row.data(), bytes), 0);
    }
  }
}

}  // namespace
}  // namespace mooncake::ep
