#include "collectives/reduce_cpu.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

// One build runs on every x86-64 and picks the widest vectors of the machine when it is loaded.
// Sanitizers cannot run before the dynamic linker picks, so their builds take the plain version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(MOONCAKE_NO_MULTIVERSION)
#define MOONCAKE_VECTORIZED \
  __attribute__((target_clones("default", "avx2,fma", "arch=x86-64-v4"), flatten))
#else
#define MOONCAKE_VECTORIZED
#endif

namespace mooncake {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;
};
// std::complex multiplies by a function call per element.
template <typename T>
struct Complex {
  T real, imag;
  friend Complex operator+(Complex a, Complex b) { return {a.real + b.real, a.imag + b.imag}; }
  friend Complex operator*(Complex a, Complex b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
};

inline float toFloat(BFloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }

inline void fromFloat(float value, BFloat16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const bool isNan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = static_cast<uint16_t>(isNan ? (bits >> 16) | 0x40 : rounded);
}

// Branch-free, so that it vectorizes: half's exponent is moved by multiplication, which also
// handles subnormals.
inline float toFloat(Float16 value) {
  const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
  const float scaled =
      std::bit_cast<float>(magnitude) * std::bit_cast<float>(uint32_t(254 - 15) << 23);
  uint32_t bits = std::bit_cast<uint32_t>(scaled);
  bits |= (value.bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;  // infinity and NaN
  return std::bit_cast<float>(bits | uint32_t(value.bits & 0x8000) << 16);
}

inline void fromFloat(float value, Float16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // Normal results: shift the exponent, round to nearest, ties to even.
  const uint32_t normal =
      (magnitude - (uint32_t(127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Subnormal results: the float adder rounds for us, at the place where 2^-24 is the last bit of
  // 0.5.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                             std::bit_cast<uint32_t>(0.5f);
  const bool isNan = magnitude > 0x7f800000;
  const bool isLarge = magnitude >= 0x477ff000;  // rounds to 65536 or more
  const uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
  out.bits = static_cast<uint16_t>(sign | (isNan ? 0x7e00 : isLarge ? 0x7c00 : half));
}

// How a type is read, computed and written.
template <typename T>
struct Element {
  using Acc = T;
  static Acc load(T value) { return value; }
  static void store(Acc acc, T& out) { out = acc; }
};
template <>
struct Element<BFloat16> {
  using Acc = float;
  static Acc load(BFloat16 value) { return toFloat(value); }
  static void store(Acc acc, BFloat16& out) { fromFloat(acc, out); }
};
template <>
struct Element<Float16> {
  using Acc = float;
  static Acc load(Float16 value) { return toFloat(value); }
  static void store(Acc acc, Float16& out) { fromFloat(acc, out); }
};
template <>
struct Element<Bool> {
  using Acc = uint8_t;
  static Acc load(Bool value) { return value.bits != 0; }
  static void store(Acc acc, Bool& out) { out.bits = acc != 0; }
};

// Signed overflow wraps, as it does in torch.
template <typename Acc>
using Wrapping = std::conditional_t<std::is_integral_v<Acc>, std::make_unsigned<Acc>,
                                    std::type_identity<Acc>>::type;

template <ReduceKind kKind, typename Acc>
inline Acc combine(Acc a, Acc b) {
  if constexpr (kKind == ReduceKind::kSum || kKind == ReduceKind::kAvg) {
    return static_cast<Acc>(static_cast<Wrapping<Acc>>(a) + static_cast<Wrapping<Acc>>(b));
  } else if constexpr (kKind == ReduceKind::kProduct) {
    // 64 bits: unsigned short would be promoted to int and overflow.
    if constexpr (std::is_integral_v<Acc>)
      return static_cast<Acc>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    return a * b;
  } else if constexpr (kKind == ReduceKind::kMin) {
    return b < a || b != b ? b : a;
  } else if constexpr (kKind == ReduceKind::kMax) {
    return b > a || b != b ? b : a;
  } else if constexpr (kKind == ReduceKind::kBitAnd) {
    return static_cast<Acc>(a & b);
  } else if constexpr (kKind == ReduceKind::kBitOr) {
    return static_cast<Acc>(a | b);
  } else {
    return static_cast<Acc>(a ^ b);
  }
}

template <typename Acc>
inline Acc divide(Acc sum, size_t by) {
  using Divisor = std::conditional_t<!std::is_integral_v<Acc>, Acc,
                                     std::conditional_t<std::is_signed_v<Acc>, int64_t, uint64_t>>;
  return static_cast<Acc>(sum / static_cast<Divisor>(by));
}
template <typename T>
inline Complex<T> divide(Complex<T> sum, size_t by) {
  return {divide(sum.real, by), divide(sum.imag, by)};
}

// A block of accumulators stays in the first-level cache while the sources stream by.
constexpr size_t kBlock = 1024;

template <typename T, ReduceKind kKind>
MOONCAKE_VECTORIZED void reduceTyped(std::byte* target, const std::byte* const* sources,
                                     size_t sourceCount, size_t count) {
  using E = Element<T>;
  using Acc = typename E::Acc;
  alignas(64) Acc acc[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t length = std::min(kBlock, count - start);
    const T* first = reinterpret_cast<const T*>(sources[0]) + start;
    for (size_t i = 0; i < length; ++i) acc[i] = E::load(first[i]);
    for (size_t s = 1; s < sourceCount; ++s) {
      const T* source = reinterpret_cast<const T*>(sources[s]) + start;
      for (size_t i = 0; i < length; ++i) acc[i] = combine<kKind>(acc[i], E::load(source[i]));
    }
    if constexpr (kKind == ReduceKind::kAvg) {
      for (size_t i = 0; i < length; ++i) acc[i] = divide(acc[i], sourceCount);
    }
    T* out = reinterpret_cast<T*>(target) + start;
    for (size_t i = 0; i < length; ++i) E::store(acc[i], out[i]);
  }
}

using Reducer = void (*)(std::byte*, const std::byte* const*, size_t, size_t);

template <typename T>
constexpr bool kIsComplex = std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>;
template <typename T>
constexpr bool kIsFloat = std::is_floating_point_v<typename Element<T>::Acc>;

// Returns null if the type has no such reduction.
template <typename T>
Reducer reducerOf(ReduceKind kind) {
  constexpr bool kIsBool = std::is_same_v<T, Bool>;
  switch (kind) {
    case ReduceKind::kPremulSum:
      if constexpr (!kIsFloat<T> && !kIsComplex<T>) return nullptr;
      [[fallthrough]];
    case ReduceKind::kSum:
      if constexpr (kIsBool) return reduceTyped<T, ReduceKind::kMax>;
      return reduceTyped<T, ReduceKind::kSum>;
    case ReduceKind::kAvg:
      if constexpr (!kIsBool) return reduceTyped<T, ReduceKind::kAvg>;
      return nullptr;
    case ReduceKind::kProduct:
      return reduceTyped<T, ReduceKind::kProduct>;
    case ReduceKind::kMin:
      if constexpr (!kIsComplex<T>) return reduceTyped<T, ReduceKind::kMin>;
      return nullptr;
    case ReduceKind::kMax:
      if constexpr (!kIsComplex<T>) return reduceTyped<T, ReduceKind::kMax>;
      return nullptr;
    case ReduceKind::kBitAnd:
      if constexpr (!kIsFloat<T> && !kIsComplex<T>) return reduceTyped<T, ReduceKind::kBitAnd>;
      return nullptr;
    case ReduceKind::kBitOr:
      if constexpr (!kIsFloat<T> && !kIsComplex<T>) return reduceTyped<T, ReduceKind::kBitOr>;
      return nullptr;
    case ReduceKind::kBitXor:
      if constexpr (!kIsFloat<T> && !kIsComplex<T>) return reduceTyped<T, ReduceKind::kBitXor>;
      return nullptr;
  }
  return nullptr;
}

Reducer findReducer(Reduction reduction) {
  switch (reduction.dtype) {
    case DType::kUInt8:
      return reducerOf<uint8_t>(reduction.kind);
    case DType::kInt8:
      return reducerOf<int8_t>(reduction.kind);
    case DType::kUInt16:
      return reducerOf<uint16_t>(reduction.kind);
    case DType::kInt16:
      return reducerOf<int16_t>(reduction.kind);
    case DType::kUInt32:
      return reducerOf<uint32_t>(reduction.kind);
    case DType::kInt32:
      return reducerOf<int32_t>(reduction.kind);
    case DType::kUInt64:
      return reducerOf<uint64_t>(reduction.kind);
    case DType::kInt64:
      return reducerOf<int64_t>(reduction.kind);
    case DType::kFloat16:
      return reducerOf<Float16>(reduction.kind);
    case DType::kBFloat16:
      return reducerOf<BFloat16>(reduction.kind);
    case DType::kFloat32:
      return reducerOf<float>(reduction.kind);
    case DType::kFloat64:
      return reducerOf<double>(reduction.kind);
    case DType::kBool:
      return reducerOf<Bool>(reduction.kind);
    case DType::kComplex64:
      return reducerOf<Complex<float>>(reduction.kind);
    case DType::kComplex128:
      return reducerOf<Complex<double>>(reduction.kind);
    default:
      return nullptr;
  }
}

}  // namespace

Status checkReduction(Reduction reduction) {
  if (findReducer(reduction)) return {};
  return Error{ErrorCode::kInvalidArgument,
               std::string("there is no ") + reduceName(reduction.kind) + " of " +
                   dtypeName(reduction.dtype) +
                   (isReducible(reduction.dtype) ? "" : " elements: they can be moved, not added")};
}

void reduceSources(Reduction reduction, std::byte* target,
                   std::span<const std::byte* const> sources, size_t count) {
  findReducer(reduction)(target, sources.data(), sources.size(), count);
}

}  // namespace mooncake
