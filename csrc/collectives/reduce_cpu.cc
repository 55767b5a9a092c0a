#include "collectives/reduce_cpu.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "kernels/common/elements.h"

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

using namespace kernels;

// A block of accumulators stays in the first-level cache while the sources stream by.
constexpr size_t kBlock = 1024;

template <typename T, Combine kBy>
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
      for (size_t i = 0; i < length; ++i) acc[i] = combine<kBy>(acc[i], E::load(source[i]));
    }
    if constexpr (kBy == Combine::kAverage) {
      for (size_t i = 0; i < length; ++i) acc[i] = divide(acc[i], sourceCount);
    }
    T* out = reinterpret_cast<T*>(target) + start;
    for (size_t i = 0; i < length; ++i) E::store(acc[i], out[i]);
  }
}

using Reducer = void (*)(std::byte*, const std::byte* const*, size_t, size_t);

template <typename T, Combine kBy>
Reducer reducerIf() {
  if constexpr (kHasReduction<T, kBy>) return reduceTyped<T, kBy>;
  return nullptr;
}

// Returns null if the type has no such reduction.
template <typename T>
Reducer reducerOf(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::kPremulSum:
      if constexpr (!kIsFloat<T> && !kIsComplex<T>) return nullptr;
      [[fallthrough]];
    case ReduceKind::kSum:
      if constexpr (std::is_same_v<T, Bool>) return reduceTyped<T, Combine::kMax>;
      return reducerIf<T, Combine::kSum>();
    case ReduceKind::kAvg:
      return reducerIf<T, Combine::kAverage>();
    case ReduceKind::kProduct:
      return reducerIf<T, Combine::kProduct>();
    case ReduceKind::kMin:
      return reducerIf<T, Combine::kMin>();
    case ReduceKind::kMax:
      return reducerIf<T, Combine::kMax>();
    case ReduceKind::kBitAnd:
      return reducerIf<T, Combine::kAnd>();
    case ReduceKind::kBitOr:
      return reducerIf<T, Combine::kOr>();
    case ReduceKind::kBitXor:
      return reducerIf<T, Combine::kXor>();
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
