#pragma once

#include "kernels/collectives.h"
#include "kernels/common/elements.h"
#include "kernels/exchange.cuh"

// The collectives as consumers of an exchange. Reductions add up in the order of ranks, with the
// bits of csrc/collectives/reduce_cpu.cc.
namespace mooncake::kernels {

MC_DEVICE int countOf(uint64_t ranks) {
  int count = 0;
  for (; ranks; ranks &= ranks - 1) ++count;
  return count;
}

template <typename T, Combine kBy, int kElements>
MC_DEVICE void reduceUnit(const GroupState& state, uint64_t number, uint64_t active, size_t offset,
                          T* target) {
  struct alignas(kElements == 1 ? alignof(T) : kElements * sizeof(T)) Unit {
    T of[kElements];
  };
  using E = Element<T>;
  typename E::Acc sums[kElements];
  bool isFirst = true;
  for (int rank = 0; rank < state.ranks; ++rank) {
    if (!has(active, rank)) continue;
    const Unit unit =
        loadUnit(reinterpret_cast<const Unit*>(published(state, rank, number) + offset));
    for (int i = 0; i < kElements; ++i) {
      const typename E::Acc value = E::load(unit.of[i]);
      sums[i] = isFirst ? value : combine<kBy>(sums[i], value);
    }
    isFirst = false;
  }
  Unit result;
  for (int i = 0; i < kElements; ++i) {
    if constexpr (kBy == Combine::kAverage) sums[i] = divide(sums[i], size_t(countOf(active)));
    E::store(sums[i], result.of[i]);
  }
  storeUnit(reinterpret_cast<Unit*>(target), result);
}

template <typename T, Combine kBy>
MC_DEVICE void reducePart(const ReduceArguments& a, const GroupState& state, uint64_t number,
                          uint64_t active, unsigned block) {
  // Short integers are seldom reduced, and long units of them take nvcc long to compile.
  constexpr bool kIsShort = sizeof(T) < 4 && !kIsFloat<T>;
  constexpr int kElements = (kIsShort ? sizeof(uint2) : sizeof(uint4)) / sizeof(T);
  const size_t offset = a.first * sizeof(T);
  const bool isAligned = (reinterpret_cast<size_t>(a.output) | offset) % sizeof(uint4) == 0;
  const Part part = partOf(a.count, block, gridDim.x, kElements);
  const size_t end =
      isAligned ? part.begin + (part.end - part.begin) / kElements * kElements : part.begin;
  T* const output = reinterpret_cast<T*>(a.output);
  for (size_t i = part.begin + threadIdx.x * kElements; i < end; i += blockDim.x * kElements)
    reduceUnit<T, kBy, kElements>(state, number, active, offset + i * sizeof(T), output + i);
  for (size_t i = end + threadIdx.x; i < part.end; i += blockDim.x)
    reduceUnit<T, kBy, 1>(state, number, active, offset + i * sizeof(T), output + i);
}

template <typename T, Combine kBy>
MC_DEVICE void reduceIf(const ReduceArguments& a, const GroupState& state, uint64_t number,
                        uint64_t active, unsigned block) {
  if constexpr (kHasReduction<T, kBy>) reducePart<T, kBy>(a, state, number, active, block);
}

template <typename T>
MC_DEVICE void reduceAll(const ReduceArguments& a) {
  exchangeAll(a.exchange,
              [&](const GroupState& state, uint64_t number, uint64_t active, unsigned block) {
                switch (a.by) {
                  case Combine::kSum:
                    return reduceIf<T, Combine::kSum>(a, state, number, active, block);
                  case Combine::kAverage:
                    return reduceIf<T, Combine::kAverage>(a, state, number, active, block);
                  case Combine::kProduct:
                    return reduceIf<T, Combine::kProduct>(a, state, number, active, block);
                  case Combine::kMin:
                    return reduceIf<T, Combine::kMin>(a, state, number, active, block);
                  case Combine::kMax:
                    return reduceIf<T, Combine::kMax>(a, state, number, active, block);
                  case Combine::kAnd:
                    return reduceIf<T, Combine::kAnd>(a, state, number, active, block);
                  case Combine::kOr:
                    return reduceIf<T, Combine::kOr>(a, state, number, active, block);
                  case Combine::kXor:
                    return reduceIf<T, Combine::kXor>(a, state, number, active, block);
                }
              });
}

MC_DEVICE void moveAll(const MoveArguments& a) {
  exchangeAll(
      a.exchange, [&](const GroupState& state, uint64_t number, uint64_t active, unsigned block) {
        const Part part = partOf(a.bytes, block, gridDim.x, 1024);
        for (int rank = 0; rank < state.ranks; ++rank) {
          if (!has(a.sources, rank)) continue;
          unsigned char* const target = a.outputs[rank] + part.begin;
          const size_t bytes = part.end - part.begin;
          if (has(active, rank)) {
            copyBytes(target, published(state, rank, number) + a.offset + part.begin, bytes);
          } else {
            zeroBytes(target, bytes);
          }
        }
      });
}

// Stops the group's kernels between two operations if none waits, so that the host's decision
// takes effect there. One thread.
MC_DEVICE void acknowledge(GroupState& state) {
  if (state.failed || loadRelaxedSystem(&state.host->stop) == state.generation) return;
  awaitDecision(state, 0, now() + state.decisionNs);
}

}  // namespace mooncake::kernels
