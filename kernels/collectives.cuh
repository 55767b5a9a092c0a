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
MC_DEVICE void reduceUnit(const GroupState& state, uint64_t serial, uint64_t active, size_t offset,
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
        loadUnit(reinterpret_cast<const Unit*>(published(state, rank, serial) + offset));
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

// Where the results of a piece go.
MC_DEVICE unsigned char* targetOf(const Exchange& exchange, unsigned char* output, size_t begin) {
  return (exchange.scratch ? exchange.scratch : output) + begin;
}

template <typename T, Combine kBy>
MC_DEVICE void reducePart(const ReduceArguments& a, const GroupState& state, const Turn& turn,
                          unsigned block) {
  // Short integers are seldom reduced, and long units of them take nvcc long to compile.
  constexpr bool kIsShort = sizeof(T) < 4 && !kIsFloat<T>;
  constexpr int kElements = (kIsShort ? sizeof(uint2) : sizeof(uint4)) / sizeof(T);
  const Part piece = pieceOf(a.exchange, turn.piece, a.bytes);
  const Part part = partOf(piece.end - piece.begin, block, gridDim.x, kPartBytes);
  T* const output = reinterpret_cast<T*>(targetOf(a.exchange, a.output, piece.begin));
  const bool isAligned = (reinterpret_cast<size_t>(output) | a.offset) % sizeof(uint4) == 0;
  const size_t begin = part.begin / sizeof(T), all = part.end / sizeof(T);
  const size_t end = isAligned ? begin + (all - begin) / kElements * kElements : begin;
  for (size_t i = begin + threadIdx.x * kElements; i < end; i += blockDim.x * kElements)
    reduceUnit<T, kBy, kElements>(state, turn.serial, turn.active, a.offset + i * sizeof(T),
                                  output + i);
  for (size_t i = end + threadIdx.x; i < all; i += blockDim.x)
    reduceUnit<T, kBy, 1>(state, turn.serial, turn.active, a.offset + i * sizeof(T), output + i);
}

template <typename T, Combine kBy>
MC_DEVICE void reduceIf(const ReduceArguments& a, const GroupState& state, const Turn& turn,
                        unsigned block) {
  if constexpr (kHasReduction<T, kBy>) reducePart<T, kBy>(a, state, turn, block);
}

template <typename T>
MC_DEVICE void reduceAll(const ReduceArguments& a) {
  exchangeAll(a.exchange, a.bytes, [&](const GroupState& state, const Turn& turn, unsigned block) {
    switch (a.by) {
      case Combine::kSum:
        return reduceIf<T, Combine::kSum>(a, state, turn, block);
      case Combine::kAverage:
        return reduceIf<T, Combine::kAverage>(a, state, turn, block);
      case Combine::kProduct:
        return reduceIf<T, Combine::kProduct>(a, state, turn, block);
      case Combine::kMin:
        return reduceIf<T, Combine::kMin>(a, state, turn, block);
      case Combine::kMax:
        return reduceIf<T, Combine::kMax>(a, state, turn, block);
      case Combine::kAnd:
        return reduceIf<T, Combine::kAnd>(a, state, turn, block);
      case Combine::kOr:
        return reduceIf<T, Combine::kOr>(a, state, turn, block);
      case Combine::kXor:
        return reduceIf<T, Combine::kXor>(a, state, turn, block);
    }
  });
}

MC_DEVICE void moveAll(const MoveArguments& a) {
  exchangeAll(a.exchange, a.bytes, [&](const GroupState& state, const Turn& turn, unsigned block) {
    const Part piece = pieceOf(a.exchange, turn.piece, a.bytes);
    const Part part = partOf(piece.end - piece.begin, block, gridDim.x, kPartBytes);
    const size_t bytes = part.end - part.begin;
    for (int rank = 0; rank < state.ranks; ++rank) {
      if (!has(a.sources, rank)) continue;
      unsigned char* const target = targetOf(a.exchange, a.outputs[rank], piece.begin) + part.begin;
      if (has(turn.active, rank)) {
        copyBytes(target, published(state, rank, turn.serial) + a.offset + part.begin, bytes);
      } else {
        zeroBytes(target, bytes);
      }
    }
  });
}

// Stops the group's kernels between two operations if none waits, so that the host's decision
// takes effect there. It runs after the kernels of all calls. Kernels of graphs run on other
// streams: it waits for one that has begun, and others wait for it. One thread.
MC_DEVICE void acknowledge(GroupState& state) {
  const uint64_t deadline = now() + state.decisionNs;
  while (addAcqRelDevice(&state.entered, kHeld) != 0) {
    addAcqRelDevice(&state.entered, kHeld);  // adding it again takes it away
    if (now() > deadline) return;
    relax();
  }
  if (!state.failed && loadRelaxedSystem(&state.host->stop) != state.generation)
    awaitDecision(state, 0, state.serial, false, now() + state.decisionNs);
  addAcqRelDevice(&state.entered, kHeld);
}

}  // namespace mooncake::kernels
