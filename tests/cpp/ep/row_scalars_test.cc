#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "ep/rows.h"
#include "kernels/common/fp8.h"
#include "kernels/common/logfmt.h"

// Compares the definitions in kernels/common with plain arithmetic.
namespace mooncake::ep {
namespace {

TEST(RowScalars, E4m3IsTheNearestCodeOfEveryValue) {
  const auto nearest = [](double value) {
    // Ties go to the even code: the neighbours differ in their last bit.
    int best = 0;
    for (int code = 1; code <= 0x7e; ++code) {
      const double now = std::abs(e4m3ToFloat(uint8_t(code)) - value);
      const double before = std::abs(e4m3ToFloat(uint8_t(best)) - value);
      if (now < before || (now == before && code % 2 == 0)) best = code;
    }
    return best;
  };
  for (const float scale : {1.0f, 448.0f / 3.0f, 0.0123f, 3.4e20f}) {
    for (int bits = 0; bits < 0x7f80; ++bits) {
      const float value = bf16ToFloat(uint16_t(bits)) * scale;
      const int code = nearest(std::min(double(value), 448.0));
      ASSERT_EQ(floatToE4m3(value), code) << value;
      ASSERT_EQ(floatToE4m3(-value), code | 0x80) << value;
    }
  }
  EXPECT_EQ(floatToE4m3(std::numeric_limits<float>::infinity()), 0x7e);
  EXPECT_EQ(floatToE4m3(std::nanf("")), 0x7f);
  EXPECT_EQ(floatToE4m3(-std::nanf("")), 0xff);
}

TEST(RowScalars, EveryE4m3CodeComesBack) {
  for (int code = 0; code < 256; ++code) EXPECT_EQ(floatToE4m3(e4m3ToFloat(uint8_t(code))), code);
}

TEST(RowScalars, RoundedScalesArePowersOfTwoAtOrAbove) {
  for (int bits = 0; bits < 0x7f80; ++bits) {
    const float amax = std::max(bf16ToFloat(uint16_t(bits)), 1e-4f);
    const Fp8Scale scale = fp8Scale(amax, true);
    int exponent = 0;
    ASSERT_EQ(std::frexp(scale.scale, &exponent), 0.5f);
    ASSERT_LE(amax, scale.scale * 448.0);
    ASSERT_GT(amax, scale.scale * 224.0);
    ASSERT_EQ(scale.scale * scale.inverse, 1.0f);
    ASSERT_EQ(std::ldexp(1.0f, int(ue8m0Of(scale.scale)) - 127), scale.scale);
  }
}

TEST(RowScalars, ExponentsArePackedByFours) {
  const std::vector<float> scales = {1, 2, 4, 8, 0.5f};
  std::vector<int32_t> packed = {-1, -1, -1};
  packUe8m0(scales.data(), scales.size(), packed.data());
  EXPECT_EQ(packed, (std::vector<int32_t>{int32_t(0x8281807f), 0x7e, -1}));
}

TEST(RowScalars, LogfmtTakesTheNearestCode) {
  for (const uint16_t largest : {0x1f80, 0x3f80, 0x3fff, 0x4b11, 0x7f7f}) {
    for (int octaves = 0; octaves <= 40; octaves += octaves < 4 ? 1 : 6) {
      const auto smallest = uint16_t(std::max(1, largest - octaves * 128 - octaves % 3));
      const LogfmtHeader header = logfmtHeader(largest, smallest);
      std::vector<float> values(512);
      for (uint32_t code = 0; code < 512; ++code) values[code] = logfmtMagnitude(code, header);
      ASSERT_TRUE(std::ranges::is_sorted(values, std::less_equal<>()) &&
                  std::ranges::adjacent_find(values) == values.end());
      ASSERT_EQ(values[511], bf16ToFloat(largest));
      uint32_t nearest = 0;
      for (int bits = 0; bits <= largest; ++bits) {
        const double value = bf16ToFloat(uint16_t(bits));
        while (nearest < 511 && values[nearest + 1] - value < value - values[nearest]) ++nearest;
        ASSERT_EQ(logfmtCode(uint16_t(bits), header), nearest) << largest << " " << smallest;
      }
    }
  }
}

}  // namespace
}  // namespace mooncake::ep
