#pragma once

#include "kernels/ep/arguments.h"
#include "kernels/two_kernels.cuh"
#include "kernels/warp.cuh"

// The common part of the kernels for experts.
namespace mooncake::kernels {

// The facts of a rank that takes part.
MC_DEVICE const RowsHeader& headerOf(const Turn& turn, int rank) {
  return *reinterpret_cast<const RowsHeader*>(turn.data[rank]);
}

MC_DEVICE int32_t chosenAt(const Chosen& chosen, size_t place) {
  if (!chosen.areWide) return static_cast<const int32_t*>(chosen.experts)[place];
  const int64_t expert = static_cast<const int64_t*>(chosen.experts)[place];
  // Not an expert either way.
  return expert < -1 || expert > INT32_MAX ? INT32_MIN : int32_t(expert);
}

// The ranks that the caller of this rank counts as active. One warp, the same on all lanes.
MC_DEVICE uint64_t ownMask(const Mask& mask, int ranks) {
  const bool isIn = int(lane()) < ranks && (!mask.ranks || mask.ranks[lane()] != 0);
  return *mask.buffer & __ballot_sync(kAllLanes, isIn);
}

// The facts that the ranks have published, as a block needs them.
struct Together {
  uint64_t participants;  // bits of the ranks that take part, and that no caller excludes
  uint32_t failure;       // a Failure of `failedRank`
  int failedRank;
};

// `dispatch`: number of the dispatch that is combined; 0: none. All threads of a block.
MC_DEVICE Together together(const GroupState& state, const Turn& turn, uint64_t dispatch) {
  // A rank that is skipped knows nothing of the other ranks.
  if (!has(turn.active, state.rank)) return {turn.active, uint32_t(Failure::kNone), -1};
  MC_SHARED(Together, shared);
  __syncthreads();  // the block may still use the facts of an earlier call
  if (threadIdx.x < kLanes) {
    const int rank = int(lane());
    uint64_t mask = turn.active;
    Failure failure = Failure::kNone;
    if (rank < state.ranks && has(turn.active, rank)) {
      const RowsHeader& theirs = headerOf(turn, rank);
      mask = theirs.mask;
      failure = Failure(theirs.failure);
      if (failure == Failure::kNone && theirs.dispatch != dispatch)
        failure = Failure::kOtherDispatch;
    }
    mask = combineLanes(mask, [](uint64_t a, uint64_t b) { return a & b; });
    const unsigned failed = __ballot_sync(kAllLanes, failure != Failure::kNone);
    const int first = __ffs(int(failed)) - 1;
    const uint32_t why = __shfl_sync(kAllLanes, uint32_t(failure), failed ? first : 0);
    if (rank == 0) {
      shared = {mask & turn.active, why, first};
      // After the loads: if they found data of another turn, this is seen.
      if (isOut(state)) shared = {0, uint32_t(Failure::kOut), state.rank};
    }
  }
  __syncthreads();
  return shared;
}

// Pushes the rows of [rows.begin, rows.end) that `isWanted(row)` names to the same place of a
// remote rank's inbox. Row 0 is at `at` of published memory, and each has `rowBytes`. One warp.
template <typename IsWanted>
MC_DEVICE void pushRows(Pushes& pushes, size_t at, size_t rowBytes, const Part& rows,
                        const IsWanted& isWanted) {
  for (size_t begin = rows.begin; begin < rows.end; begin += kLanes) {
    const size_t row = begin + lane();
    const bool isOne = row < rows.end && isWanted(row);
    // The first lane of a run of rows pushes all of them.
    const unsigned wanted = __ballot_sync(kAllLanes, isOne), from = wanted >> lane();
    const bool isBegin = isOne && (lane() == 0 || !(wanted >> (lane() - 1) & 1));
    const unsigned count = ~from ? unsigned(__ffs(int(~from)) - 1) : kLanes;
    const size_t place = at + row * rowBytes;
    push(pushes, place, place, isBegin ? count * rowBytes : 0);
  }
}

// This kernel's waits for the ranks, in shared memory.
struct Waits {
  uint64_t since;
  uint64_t ns[kMaxRanks];
  bool hasCome[kMaxRanks];
};

// Waits until each rank has signalled its part for this block, or for as long as a kernel waits,
// and notes how long that took. All threads of a block, of which there are as many as ranks.
MC_DEVICE void measureWaits(const Exchange& exchange, const Turn& turn, Waits& waits) {
  const uint64_t since = now();
  if (threadIdx.x == 0) waits.since = since;
  const int rank = int(threadIdx.x);
  if (rank >= exchange.state->ranks) return;
  waits.hasCome[rank] = !has(turn.active, rank) ||
                        awaitSignal(exchange, turn.serial, blockIdx.x, rank,
                                    since + exchange.state->patienceNs) == Waited::kArrived;
  waits.ns[rank] = now() - since;
}

// Tells the caller which ranks take no part. All threads of the last block.
MC_DEVICE void tellCaller(const Exchange& exchange, const Mask& mask, uint64_t participants) {
  const int rank = int(threadIdx.x);
  if (rank < exchange.state->ranks && mask.ranks && !has(participants, rank)) mask.ranks[rank] = 0;
}

// Adds up the caller's waits, if it wants to know them. All threads of the last block.
MC_DEVICE void tellWaits(const Exchange& exchange, const Turn& turn, int64_t* waited,
                         const Waits& waits) {
  const int rank = int(threadIdx.x);
  if (rank >= exchange.state->ranks || !waited || !has(turn.active, exchange.state->rank)) return;
  const uint64_t ns = waits.hasCome[rank] ? waits.ns[rank] : now() - waits.since;
  waited[rank] += int64_t(ns / 1000);
}

// Fails the group if a rank's inputs are wrong. All threads of the last block.
MC_DEVICE bool succeeds(const Exchange& exchange, const Together& with) {
  if (with.failure == uint32_t(Failure::kNone)) return true;
  if (threadIdx.x == 0) failGroup(*exchange.state, Failure(with.failure), with.failedRank);
  return false;
}

}  // namespace mooncake::kernels
