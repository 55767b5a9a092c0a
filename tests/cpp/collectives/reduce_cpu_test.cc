#include "collectives/reduce_cpu.h"

#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <vector>

namespace mooncake {
namespace {

template <typename T>
std::vector<T> reduce(DType dtype, ReduceKind kind, const std::vector<std::vector<T>>& sources) {
  std::vector<const std::byte*> raw;
  for (const auto& source : sources)
    raw.push_back(reinterpret_cast<const std::byte*>(source.data()));
  std::vector<T> target(sources[0].size());
  reduceSources({dtype, kind}, reinterpret_cast<std::byte*>(target.data()), raw, target.size());
  return target;
}

std::vector<float> reduceComplex(ReduceKind kind, const std::vector<std::vector<float>>& sources) {
  std::vector<const std::byte*> raw;
  for (const auto& source : sources)
    raw.push_back(reinterpret_cast<const std::byte*>(source.data()));
  std::vector<float> target(sources[0].size());
  reduceSources({DType::kComplex64, kind}, reinterpret_cast<std::byte*>(target.data()), raw,
                target.size() / 2);
  return target;
}

TEST(ReduceCpuTest, IntegersOfEveryKind) {
  const std::vector<std::vector<int32_t>> sources = {{5, -7, 2}, {3, 3, -9}, {4, 1, 2}};
  EXPECT_EQ(reduce(DType::kInt32, ReduceKind::kSum, sources), (std::vector<int32_t>{12, -3, -5}));
  EXPECT_EQ(reduce(DType::kInt32, ReduceKind::kAvg, sources), (std::vector<int32_t>{4, -1, -1}));
  EXPECT_EQ(reduce(DType::kInt32, ReduceKind::kProduct, sources),
            (std::vector<int32_t>{60, -21, -36}));
  EXPECT_EQ(reduce(DType::kInt32, ReduceKind::kMin, sources), (std::vector<int32_t>{3, -7, -9}));
  EXPECT_EQ(reduce(DType::kInt32, ReduceKind::kMax, sources), (std::vector<int32_t>{5, 3, 2}));
}

TEST(ReduceCpuTest, OverflowWraps) {
  const std::vector<std::vector<int32_t>> big = {{std::numeric_limits<int32_t>::max()}, {1}};
  EXPECT_EQ(reduce(DType::kInt32, ReduceKind::kSum, big)[0], std::numeric_limits<int32_t>::min());
  const std::vector<std::vector<uint16_t>> product = {{65535}, {65535}};
  EXPECT_EQ(reduce(DType::kUInt16, ReduceKind::kProduct, product)[0], 1);
}

TEST(ReduceCpuTest, NanWinsInMinAndMaxFromEitherSide) {
  const float nan = std::nanf("");
  for (const auto kind : {ReduceKind::kMin, ReduceKind::kMax}) {
    const auto result = reduce<float>(DType::kFloat32, kind, {{nan, 1, 2}, {1, nan, 3}});
    EXPECT_TRUE(std::isnan(result[0]) && std::isnan(result[1]));
    EXPECT_EQ(result[2], kind == ReduceKind::kMin ? 2 : 3);
  }
}

TEST(ReduceCpuTest, BooleansAreLogic) {
  const std::vector<std::vector<uint8_t>> sources = {{1, 0, 1, 0}, {1, 0, 0, 1}};
  EXPECT_EQ(reduce(DType::kBool, ReduceKind::kSum, sources), (std::vector<uint8_t>{1, 0, 1, 1}));
  EXPECT_EQ(reduce(DType::kBool, ReduceKind::kProduct, sources),
            (std::vector<uint8_t>{1, 0, 0, 0}));
  EXPECT_FALSE(checkReduction({DType::kBool, ReduceKind::kAvg}).ok());
}

TEST(ReduceCpuTest, Bits) {
  const std::vector<std::vector<int16_t>> sources = {{0b1100, -1, 0}, {0b1010, 5, -7}};
  EXPECT_EQ(reduce(DType::kInt16, ReduceKind::kBitAnd, sources), (std::vector<int16_t>{8, 5, 0}));
  EXPECT_EQ(reduce(DType::kInt16, ReduceKind::kBitOr, sources), (std::vector<int16_t>{14, -1, -7}));
  EXPECT_EQ(reduce(DType::kInt16, ReduceKind::kBitXor, sources), (std::vector<int16_t>{6, -6, -7}));
  const std::vector<std::vector<uint8_t>> flags = {{1, 0, 1, 0}, {1, 0, 0, 1}, {1, 1, 0, 1}};
  EXPECT_EQ(reduce(DType::kBool, ReduceKind::kBitXor, flags), (std::vector<uint8_t>{1, 1, 1, 0}));
  EXPECT_FALSE(checkReduction({DType::kFloat32, ReduceKind::kBitOr}).ok());
}

// Real and imaginary parts alternate.
TEST(ReduceCpuTest, ComplexNumbers) {
  const std::vector<std::vector<float>> sources = {{1, 2, 0, 1}, {3, -4, 0, 1}};
  EXPECT_EQ(reduceComplex(ReduceKind::kSum, sources), (std::vector<float>{4, -2, 0, 2}));
  EXPECT_EQ(reduceComplex(ReduceKind::kAvg, sources), (std::vector<float>{2, -1, 0, 1}));
  EXPECT_EQ(reduceComplex(ReduceKind::kPremulSum, sources), (std::vector<float>{4, -2, 0, 2}));
  EXPECT_EQ(reduceComplex(ReduceKind::kProduct, sources), (std::vector<float>{11, 2, -1, 0}));
  for (const auto kind : {ReduceKind::kMin, ReduceKind::kMax, ReduceKind::kBitAnd})
    EXPECT_EQ(checkReduction({DType::kComplex128, kind}).code(), ErrorCode::kInvalidArgument);
}

// Every half is exactly a float, so reducing one source must give it back, and the sum of two is
// rounded once.
TEST(ReduceCpuTest, HalvesSurviveTheRoundTrip) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = uint16_t(i);
    const auto back = reduce<uint16_t>(dtype, ReduceKind::kSum, {all});
    const uint16_t exponent = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
    for (size_t i = 0; i < all.size(); ++i) {
      const bool isNan = (i & exponent) == exponent && (i & uint16_t(~exponent) & 0x7fff) != 0;
      if (isNan) {
        EXPECT_TRUE((back[i] & exponent) == exponent &&
                    (back[i] & uint16_t(~exponent) & 0x7fff) != 0)
            << i;
      } else {
        EXPECT_EQ(back[i], i);
      }
    }
  }
}

// Compares with the definition: the nearest half, ties to the even one.
TEST(ReduceCpuTest, HalfSumsAreRoundedToTheNearest) {
  const auto value = [](uint16_t half) {
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    const double magnitude =
        exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return half & 0x8000 ? -magnitude : magnitude;
  };
  std::mt19937 random(1);
  std::vector<uint16_t> a(20000), b(20000);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = uint16_t(random() % 0x7c00) | uint16_t(random() % 2 << 15);
    b[i] = uint16_t(random() % 0x7c00) | uint16_t(random() % 2 << 15);
  }
  const auto sums = reduce<uint16_t>(DType::kFloat16, ReduceKind::kSum, {a, b});
  for (size_t i = 0; i < a.size(); ++i) {
    const double exact = double(float(value(a[i])) + float(value(b[i])));
    const uint16_t got = sums[i];
    if ((got & 0x7fff) == 0x7c00) {
      EXPECT_GE(std::abs(exact), 65520) << i;
      continue;
    }
    const double error = std::abs(value(got) - exact);
    for (const int step : {-1, 1}) {
      const uint16_t neighbour = uint16_t((got & 0x7fff) + step) | uint16_t(got & 0x8000);
      if ((got & 0x7fff) + step < 0 || (neighbour & 0x7fff) >= 0x7c00) continue;
      const double other = std::abs(value(neighbour) - exact);
      EXPECT_TRUE(error < other || (error == other && got % 2 == 0)) << a[i] << " + " << b[i];
    }
  }
}

TEST(ReduceCpuTest, TheTargetMayBeASource) {
  std::vector<float> a(5000, 1), b(5000, 2);
  const std::byte* sources[] = {reinterpret_cast<std::byte*>(a.data()),
                                reinterpret_cast<std::byte*>(b.data())};
  reduceSources({DType::kFloat32, ReduceKind::kSum}, reinterpret_cast<std::byte*>(b.data()),
                sources, b.size());
  EXPECT_EQ(b, std::vector<float>(5000, 3));
}

TEST(ReduceCpuTest, NoArithmeticForFloat8) {
  for (const DType dtype : {DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kFloat8E8M0FNU}) {
    EXPECT_EQ(checkReduction({dtype, ReduceKind::kSum}).code(), ErrorCode::kInvalidArgument);
  }
}

TEST(ReduceCpuTest, FactorsAreForFloats) {
  EXPECT_TRUE(checkReduction({DType::kBFloat16, ReduceKind::kPremulSum}).ok());
  EXPECT_FALSE(checkReduction({DType::kInt32, ReduceKind::kPremulSum}).ok());
}

}  // namespace
}  // namespace mooncake
