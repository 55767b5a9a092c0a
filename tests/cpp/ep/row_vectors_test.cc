#include <cstring>
#include <gtest/gtest.h>
#include <vector>

#include "ep/rows.h"
#include "kernels/common/fp8.h"
#include "kernels/common/logfmt.h"

// Compares with results that torch and exact fractions have computed (row_vectors.inc).
namespace mooncake::ep {
namespace {

#include "row_vectors.inc"

class RowVectors : public testing::TestWithParam<Isa> {
 protected:
  const RowFunctions& rows = rowsOf(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Isas, RowVectors, testing::ValuesIn(availableIsas()),
                         [](const auto& info) { return isaName(info.param); });

template <typename T, size_t kCount>
std::vector<T> listed(const T (&values)[kCount]) {
  return {values, values + kCount};
}

std::vector<uint32_t> bitsOfAll(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(bitsOf(value));
  return bits;
}

TEST(RowVectorsOfScalars, FloatsBecomeE4m3AsInTorch) {
  for (size_t i = 0; i < std::size(kE4m3Floats); ++i) {
    EXPECT_EQ(floatToE4m3(floatOf(kE4m3Floats[i])), kE4m3Codes[i]) << floatOf(kE4m3Floats[i]);
    EXPECT_EQ(floatToE4m3(-floatOf(kE4m3Floats[i])), kE4m3Codes[i] | 0x80);
  }
}

TEST(RowVectorsOfScalars, FloatsBecomeBf16AsInTorch) {
  for (size_t i = 0; i < std::size(kBf16Floats); ++i)
    EXPECT_EQ(floatToBf16(floatOf(kBf16Floats[i])), kBf16Rounded[i]) << std::hex << kBf16Floats[i];
}

TEST_P(RowVectors, RowsBecomeFp8AsInTorch) {
  constexpr size_t kHidden = std::size(kFp8Row);
  std::vector<uint8_t> codes(kHidden);
  std::vector<float> scales(scalesOf(kHidden));
  rows.castRowToFp8(kFp8Row, kHidden, false, codes.data(), scales.data());
  EXPECT_EQ(codes, listed(kFp8Codes));
  EXPECT_EQ(bitsOfAll(scales), listed(kFp8Scales));

  rows.castRowToFp8(kFp8Row, kHidden, true, codes.data(), scales.data());
  EXPECT_EQ(codes, listed(kFp8RoundedCodes));
  EXPECT_EQ(bitsOfAll(scales), listed(kFp8RoundedScales));
  std::vector<int32_t> words((scales.size() + 3) / 4);
  packUe8m0(scales.data(), scales.size(), words.data());
  EXPECT_EQ(std::vector<uint32_t>(words.begin(), words.end()), listed(kFp8Exponents));
}

TEST_P(RowVectors, SumsAreRoundedOnceForEachRow) {
  constexpr size_t kRows = std::size(kCombineWeights);
  constexpr size_t kHidden = std::size(kCombineSum);
  std::vector<WeightedRow> weighted;
  for (size_t r = 0; r < kRows; ++r)
    weighted.push_back({kCombineRows + r * kHidden, floatOf(kCombineWeights[r])});
  std::vector<uint16_t> sum(kHidden);
  rows.combineRows(weighted, kHidden, sum.data());
  EXPECT_EQ(sum, listed(kCombineSum));
}

TEST_P(RowVectors, RowsBecomeLogfmtAsInFractions) {
  constexpr size_t kHidden = std::size(kLogfmtRow);
  std::vector<std::byte> coded(logfmtRowBytes(kHidden));
  const size_t bytes = rows.encodeLogfmtRow(kLogfmtRow, kHidden, coded.data());
  const auto* start = reinterpret_cast<const uint8_t*>(coded.data());
  EXPECT_EQ(std::vector<uint8_t>(start, start + bytes), listed(kLogfmtBytes));

  const WeightedRow weighted{coded.data(), 1};
  std::vector<uint16_t> decoded(kHidden);
  rows.combineLogfmtRows({&weighted, 1}, kHidden, decoded.data());
  // The second block is raw, and so is the short last one.
  std::vector<uint16_t> ofCoded(decoded.begin(), decoded.begin() + kBlock);
  ofCoded.insert(ofCoded.end(), decoded.begin() + 2 * kBlock, decoded.begin() + 4 * kBlock);
  EXPECT_EQ(ofCoded, listed(kLogfmtDecoded));
  EXPECT_EQ(std::memcmp(&decoded[kBlock], &kLogfmtRow[kBlock], kBlock * 2), 0);
}

}  // namespace
}  // namespace mooncake::ep
