#pragma once

#include "kernels/collectives.h"
#include "kernels/device.h"
#include "kernels/group_state.h"

// Begin and end of an operation of a kernel's group, and its questions to the host.
namespace mooncake::kernels {

MC_DEVICE bool has(uint64_t ranks, int rank) { return ranks >> rank & 1; }

// The ranks that take part in the next operation. Late ones may be skipped, also this one.
MC_DEVICE uint64_t activeIn(const GroupState& state) {
  const uint64_t number = state.done + 1;
  const uint64_t active = number == state.partial ? state.among : state.active;
  return number <= state.skipped ? active & ~(uint64_t(1) << state.rank) : active;
}

// A block begins: not while acknowledge() holds the group, so that the host's decision lies between
// two operations. That ends with a deadline of its own. All threads.
MC_DEVICE void enter(GroupState& state) {
  if (threadIdx.x == 0) {
    uint32_t entered = addAcqRelDevice(&state.entered, 1);
    while (entered & kHeld) {
      relax();
      entered = loadAcquireDevice(&state.entered);
    }
  }
  __syncthreads();
}

// `blocks` blocks, which have all entered, use the state no more. One thread.
MC_DEVICE void leave(const Exchange& exchange, uint32_t blocks) {
  if (exchange.isHeld) addAcqRelDevice(&exchange.state->entered, 0u - blocks);
}

// Whether the other ranks have gone on without this one. Then its reads may be torn. A rank that has
// read data that another one has written since sees this word: change() has the other fence.
MC_DEVICE bool isOut(const GroupState& state) {
  fenceSystem();
  return loadAcquireSystem(&state.signals[state.rank]->isOut) != 0;
}

// The functions below are called by one thread of the last block.

MC_DEVICE void endOperation(const Exchange& exchange, uint64_t serial) {
  GroupState& state = *exchange.state;
  // A decision may have moved it on.
  if (state.serial < serial) state.serial = serial;
  storeRelaxedSystem(&state.host->done, ++state.done);
  // A host that sees the call's end also sees its misfit, and the changes of ranks before it.
  if (!exchange.isOfGraph) storeReleaseSystem(&state.host->calls, ++state.calls);
}

MC_DEVICE void failGroup(GroupState& state, Failure failure, int rank) {
  state.failed = uint32_t(failure);
  state.host->failedRank = uint32_t(rank);
  storeReleaseSystem(&state.host->failed, uint32_t(failure));
}

// Changes the ranks that take part. Tells the host from which operation on, and tells the ranks
// that are out.
MC_DEVICE void change(GroupState& state, Decision decision, bool isOfGraph, uint64_t active) {
  if (active == state.active) return;
  HostWords& host = *state.host;
  const uint32_t count = host.changeCount;
  const bool takes = decision == Decision::kTake;
  host.changes[count] = {state.done + takes, state.calls + (takes && !isOfGraph), active};
  storeReleaseSystem(&host.changeCount, count + 1);
  const uint64_t out = state.active & ~active & ~state.remote.ranks;
  for (int rank = 0; rank < state.ranks; ++rank)
    if (has(out, rank)) storeReleaseSystem(&state.signals[rank]->isOut, 1);
  // Then other threads, and later kernels, overwrite data that these ranks may still read. A release
  // does not order the stores after it.
  if (out) fenceSystem();
  state.active = active;
}

// How far a rank has come; see HostWords.
struct Progress {
  uint64_t stoppedAt, taken, hadAll;
};

// Tells the host that this kernel has stopped, and waits for its decision, which takes effect. kRefuse
// if no decision comes.
MC_DEVICE Decision awaitDecision(GroupState& state, uint64_t missing, const Progress& progress,
                                 bool isOfGraph, uint64_t deadline) {
  HostWords& host = *state.host;
  const uint32_t next = state.generation + 1;
  host.missing = missing;
  host.stoppedAt = progress.stoppedAt;
  host.ended = state.serial;
  host.taken = progress.taken;
  host.hadAll = progress.hadAll;
  storeReleaseSystem(&host.stopped, next);
  uint32_t decided;
  // A refusal may follow at once, and then its generation is a later one.
  while (int32_t((decided = loadAcquireSystem(&host.decided)) - next) < 0) {
    if (now() > deadline) {
      failGroup(state, Failure::kUndecided, state.rank);
      return Decision::kRefuse;
    }
    relax();
  }
  const Decision decision = Decision(loadRelaxedSystem(&host.decision));
  if (decision == Decision::kRefuse) failGroup(state, Failure::kRefused, state.rank);
  if (decision != Decision::kRefuse) {
    change(state, decision, isOfGraph, loadRelaxedSystem(&host.active));
    state.serial = loadRelaxedSystem(&host.serial);
    state.partial = loadRelaxedSystem(&host.partial);
    state.among = loadRelaxedSystem(&host.among);
    state.skipped = loadRelaxedSystem(&host.skipped);
  }
  state.generation = decided;
  return decision;
}

}  // namespace mooncake::kernels
