#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/common/host_device.h"

// Elements of tensors and their reductions, with the same bits on CPUs and GPUs. float16 and
// bfloat16 are computed in float32. NaN wins in kMin and kMax. Signed integers wrap, as in torch.
namespace mooncake::kernels {

using ep::bitsOf;
using ep::floatOf;
using ep::product;

enum class Combine : uint8_t { kSum, kAverage, kProduct, kMin, kMax, kAnd, kOr, kXor };

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;
};

MOONCAKE_HOST_DEVICE inline double product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// std::complex multiplies by a function call per element.
template <typename T>
struct Complex {
  T real, imag;
  MOONCAKE_HOST_DEVICE friend Complex operator+(Complex a, Complex b) {
    return {a.real + b.real, a.imag + b.imag};
  }
  MOONCAKE_HOST_DEVICE friend Complex operator*(Complex a, Complex b) {
    return {product(a.real, b.real) - product(a.imag, b.imag),
            product(a.real, b.imag) + product(a.imag, b.real)};
  }
};

MOONCAKE_HOST_DEVICE inline float toFloat(BFloat16 value) {
  return floatOf(uint32_t(value.bits) << 16);
}
MOONCAKE_HOST_DEVICE inline void fromFloat(float value, BFloat16& out) {
  const uint32_t bits = bitsOf(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const bool isNan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = static_cast<uint16_t>(isNan ? (bits >> 16) | 0x40 : rounded);
}

// Branch-free, so that it vectorizes: half's exponent is moved by multiplication, which also
// handles subnormals.
MOONCAKE_HOST_DEVICE inline float toFloat(Float16 value) {
  const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
  uint32_t bits = bitsOf(product(floatOf(magnitude), floatOf(uint32_t(254 - 15) << 23)));
  bits |= (value.bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;  // infinity and NaN
  return floatOf(bits | uint32_t(value.bits & 0x8000) << 16);
}
MOONCAKE_HOST_DEVICE inline void fromFloat(float value, Float16& out) {
  const uint32_t bits = bitsOf(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // Normal results: shift the exponent, round to nearest, ties to even.
  const uint32_t normal =
      (magnitude - (uint32_t(127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Subnormal results: the float adder rounds for us, at the place where 2^-24 is the last bit of
  // 0.5.
  const uint32_t subnormal = bitsOf(floatOf(magnitude) + 0.5f) - bitsOf(0.5f);
  const bool isNan = magnitude > 0x7f800000;
  const bool isLarge = magnitude >= 0x477ff000;  // rounds to 65536 or more
  const uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
  out.bits = static_cast<uint16_t>(sign | (isNan ? 0x7e00 : isLarge ? 0x7c00 : half));
}

// How a type is read, computed and written.
template <typename T>
struct Element {
  using Acc = T;
  MOONCAKE_HOST_DEVICE static Acc load(T value) { return value; }
  MOONCAKE_HOST_DEVICE static void store(Acc acc, T& out) { out = acc; }
};
template <>
struct Element<BFloat16> {
  using Acc = float;
  MOONCAKE_HOST_DEVICE static Acc load(BFloat16 value) { return toFloat(value); }
  MOONCAKE_HOST_DEVICE static void store(Acc acc, BFloat16& out) { fromFloat(acc, out); }
};
template <>
struct Element<Float16> {
  using Acc = float;
  MOONCAKE_HOST_DEVICE static Acc load(Float16 value) { return toFloat(value); }
  MOONCAKE_HOST_DEVICE static void store(Acc acc, Float16& out) { fromFloat(acc, out); }
};
template <>
struct Element<Bool> {
  using Acc = uint8_t;
  MOONCAKE_HOST_DEVICE static Acc load(Bool value) { return value.bits != 0; }
  MOONCAKE_HOST_DEVICE static void store(Acc acc, Bool& out) { out.bits = acc != 0; }
};

template <typename T>
constexpr bool kIsComplex = std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>;
template <typename T>
constexpr bool kIsFloat = std::is_floating_point_v<typename Element<T>::Acc>;

// Whether elements of type T have the reduction. Booleans: the sum is their maximum.
template <typename T, Combine kBy>
constexpr bool kHasReduction =
    kBy == Combine::kAverage ? !std::is_same_v<T, Bool>
    : kBy == Combine::kMin || kBy == Combine::kMax
        ? !kIsComplex<T>
        : kBy == Combine::kSum || kBy == Combine::kProduct || (!kIsFloat<T> && !kIsComplex<T>);

template <typename Acc>
using Wrapping = typename std::conditional_t<std::is_integral_v<Acc>, std::make_unsigned<Acc>,
                                             std::common_type<Acc>>::type;

template <Combine kBy, typename Acc>
MOONCAKE_HOST_DEVICE inline Acc combine(Acc a, Acc b) {
  if constexpr (kBy == Combine::kSum || kBy == Combine::kAverage) {
    return static_cast<Acc>(static_cast<Wrapping<Acc>>(a) + static_cast<Wrapping<Acc>>(b));
  } else if constexpr (kBy == Combine::kProduct) {
    // 64 bits: unsigned short would be promoted to int and overflow.
    if constexpr (std::is_integral_v<Acc>)
      return static_cast<Acc>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    else
      return a * b;
  } else if constexpr (kBy == Combine::kMin) {
    return b < a || b != b ? b : a;
  } else if constexpr (kBy == Combine::kMax) {
    return b > a || b != b ? b : a;
  } else if constexpr (kBy == Combine::kAnd) {
    return static_cast<Acc>(a & b);
  } else if constexpr (kBy == Combine::kOr) {
    return static_cast<Acc>(a | b);
  } else {
    return static_cast<Acc>(a ^ b);
  }
}

template <typename Acc>
MOONCAKE_HOST_DEVICE inline Acc divide(Acc sum, size_t by) {
  using Divisor = std::conditional_t<!std::is_integral_v<Acc>, Acc,
                                     std::conditional_t<std::is_signed_v<Acc>, int64_t, uint64_t>>;
  return static_cast<Acc>(sum / static_cast<Divisor>(by));
}
template <typename T>
MOONCAKE_HOST_DEVICE inline Complex<T> divide(Complex<T> sum, size_t by) {
  return {divide(sum.real, by), divide(sum.imag, by)};
}

}  // namespace mooncake::kernels
