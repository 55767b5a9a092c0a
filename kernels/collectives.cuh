#pragma once

#include "kernels/collectives.h"
#include "kernels/common/elements.h"
#include "kernels/exchange.cuh"

// The collectives as consumers of an exchange. Reductions add up in the order of ranks, with the
// bits of csrc/collectives/reduce_cpu.cc.
namespace mooncake::kernels {

template <typename T, Combine kBy, int kElements>
MC_DEVICE void reduceUnit(const GroupState& state, const Turn& turn, size_t offset, T* target) {
  struct alignas(kElements == 1 ? alignof(T) : kElements * sizeof(T)) Unit {
    T of[kElements];
  };
  const auto unitOf = [&](int rank) {
    return loadUnit(reinterpret_cast<const Unit*>(turn.data[rank] + offset));
  };
  using E = Element<T>;
  typename E::Acc sums[kElements];
  // The first rank stands apart: otherwise nvcc takes many registers more, and some kernels spill.
  int rank = 0;
  while (!has(turn.active, rank)) ++rank;
  const Unit first = unitOf(rank);
  for (int i = 0; i < kElements; ++i) sums[i] = E::load(first.of[i]);
  while (++rank < state.ranks) {
    if (!has(turn.active, rank)) continue;
    const Unit unit = unitOf(rank);
    for (int i = 0; i < kElements; ++i) sums[i] = combine<kBy>(sums[i], E::load(unit.of[i]));
  }
  Unit result;
  for (int i = 0; i < kElements; ++i) {
    if constexpr (kBy == Combine::kAverage) sums[i] = divide(sums[i], size_t(countOf(turn.active)));
    E::store(sums[i], result.of[i]);
  }
  storeUnit(reinterpret_cast<Unit*>(target), result);
}

// Where the results of a piece go.
MC_DEVICE unsigned char* targetOf(const Exchange& exchange, unsigned char* output, size_t begin) {
  return (exchange.scratch ? exchange.scratch : output) + begin;
}

// A block's part of a reduction: `bytes` at `offset` of each rank's published memory.
struct Reduction {
  size_t offset, bytes;
  unsigned char* target;
};

MC_DEVICE Reduction reductionOf(const ReduceArguments& a, const GroupState& state, const Turn& turn,
                                unsigned block) {
  const Part piece = pieceOf(a.exchange, turn, a.bytes);
  size_t bytes = piece.end - piece.begin, offset = a.offset;
  unsigned char* target = targetOf(a.exchange, a.output, piece.begin);
  if (a.exchange.isTwoShot) {
    const Part own = segmentOf(turn.active, state.rank, bytes);
    offset = own.begin;
    bytes = own.end - own.begin;
    target = bankAt(state, state.rank, turn.serial + 1) + offset;
  }
  const Part part = partOf(bytes, block, gridDim.x, kPartBytes);
  return {offset + part.begin, part.end - part.begin, target + part.begin};
}

template <typename T, Combine kBy>
MC_DEVICE void reducePart(const GroupState& state, const Turn& turn, const Reduction& part) {
  // Short integers are seldom reduced, and long units of them take nvcc long to compile.
  constexpr bool kIsShort = sizeof(T) < 4 && !kIsFloat<T>;
  constexpr int kElements = (kIsShort ? sizeof(uint2) : sizeof(uint4)) / sizeof(T);
  T* const target = reinterpret_cast<T*>(part.target);
  const bool isAligned = (reinterpret_cast<size_t>(target) | part.offset) % sizeof(uint4) == 0;
  const size_t all = part.bytes / sizeof(T), end = isAligned ? all / kElements * kElements : 0;
  for (size_t i = threadIdx.x * kElements; i < end; i += blockDim.x * kElements)
    reduceUnit<T, kBy, kElements>(state, turn, part.offset + i * sizeof(T), target + i);
  for (size_t i = end + threadIdx.x; i < all; i += blockDim.x)
    reduceUnit<T, kBy, 1>(state, turn, part.offset + i * sizeof(T), target + i);
}

// Copies the block's part of a piece from the segments of all ranks. The part is as in commit().
MC_DEVICE void gatherSegments(const ReduceArguments& a, const GroupState& state, const Turn& turn,
                              unsigned block) {
  const Part piece = pieceOf(a.exchange, turn, a.bytes);
  const size_t bytes = piece.end - piece.begin;
  const Part part = partOf(bytes, block, gridDim.x, kPartBytes);
  unsigned char* const target = targetOf(a.exchange, a.output, piece.begin);
  const unsigned count = unsigned(countOf(turn.active));
  unsigned number = 0;
  for (int rank = 0; rank < state.ranks; ++rank) {
    if (!has(turn.active, rank)) continue;
    const Part segment = partOf(bytes, number++, count, kSegmentBytes);
    const Part own = commonOf(segment, part);
    copyBytes(target + own.begin, turn.data[rank] + own.begin, own.end - own.begin);
  }
}

template <typename T, Combine kBy>
MC_DEVICE void reduceIf(const GroupState& state, const Turn& turn, const Reduction& part) {
  if constexpr (kHasReduction<T, kBy>) reducePart<T, kBy>(state, turn, part);
}

template <typename T>
MC_DEVICE void reduceAll(const ReduceArguments& a) {
  exchangeAll(a.exchange, a.bytes, [&](const GroupState& state, const Turn& turn, unsigned block) {
    if (gathersSegments(a.exchange, turn)) return gatherSegments(a, state, turn, block);
    const Reduction part = reductionOf(a, state, turn, block);
    switch (a.by) {
      case Combine::kSum:
        return reduceIf<T, Combine::kSum>(state, turn, part);
      case Combine::kAverage:
        return reduceIf<T, Combine::kAverage>(state, turn, part);
      case Combine::kProduct:
        return reduceIf<T, Combine::kProduct>(state, turn, part);
      case Combine::kMin:
        return reduceIf<T, Combine::kMin>(state, turn, part);
      case Combine::kMax:
        return reduceIf<T, Combine::kMax>(state, turn, part);
      case Combine::kAnd:
        return reduceIf<T, Combine::kAnd>(state, turn, part);
      case Combine::kOr:
        return reduceIf<T, Combine::kOr>(state, turn, part);
      case Combine::kXor:
        return reduceIf<T, Combine::kXor>(state, turn, part);
    }
  });
}

MC_DEVICE void moveAll(const MoveArguments& a) {
  exchangeAll(a.exchange, a.bytes, [&](const GroupState& state, const Turn& turn, unsigned block) {
    const Part piece = pieceOf(a.exchange, turn, a.bytes);
    const Part part = partOf(piece.end - piece.begin, block, gridDim.x, kPartBytes);
    const size_t bytes = part.end - part.begin;
    for (int rank = 0; rank < state.ranks; ++rank) {
      if (!has(a.sources, rank)) continue;
      unsigned char* const target = targetOf(a.exchange, a.outputs[rank], piece.begin) + part.begin;
      if (has(turn.active, rank)) {
        copyBytes(target, turn.data[rank] + a.offset + part.begin, bytes);
      } else {
        zeroBytes(target, bytes);
      }
    }
  });
}

// Holds up blocks that begin, unless one has begun. Changes nothing while blocks run.
MC_DEVICE bool hold(GroupState& state) {
  if (loadAcquireDevice(&state.entered) != 0) return false;
  if (addAcqRelDevice(&state.entered, kHeld) == 0) return true;
  addAcqRelDevice(&state.entered, kHeld);  // adding it again takes it away
  return false;
}

// Stops the group's kernels between two operations if none waits, so that the host's decision takes
// effect there. Some of them run on other streams: it waits for a kernel that has begun, and later
// kernels wait for it. It runs after all kernels that do not (Exchange::isHeld). One thread.
MC_DEVICE void acknowledge(GroupState& state) {
  const uint64_t deadline = now() + state.decisionNs;
  while (!hold(state)) {
    if (now() > deadline) return;
    relax();
  }
  if (!state.failed && loadRelaxedSystem(&state.host->stop) != state.generation)
    awaitDecision(state, 0, {state.done, state.serial, state.hadAll}, false,
                  now() + state.decisionNs);
  addAcqRelDevice(&state.entered, kHeld);
}

}  // namespace mooncake::kernels
