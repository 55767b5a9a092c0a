#pragma once

#include "kernels/collectives.h"
#include "kernels/copy.cuh"
#include "kernels/device.h"
#include "kernels/group_state.h"

// One operation of a group on GPUs of one host: each rank publishes its input in memory that all
// ranks map, signals that, waits for the others' signals, and computes its result from their
// memory. This memory outlives its owner. So once one rank has ended an operation, every other rank
// can end it with the same data.
//
// A kernel does not wait for a lost or late rank for long. It stops, tells the host which ranks it
// misses, and waits for a decision with a deadline of its own. All blocks but one end, and that one
// redoes the whole operation if the host decides so.
namespace mooncake::kernels {

// The part of a block: [begin, end) of `count`.
struct Part {
  size_t begin, end;
};
MC_DEVICE Part partOf(size_t count, unsigned block, unsigned blocks, size_t unit) {
  const size_t units = (count + unit - 1) / unit;
  const size_t begin = units * block / blocks * unit, end = units * (block + 1) / blocks * unit;
  return {begin < count ? begin : count, end < count ? end : count};
}

MC_DEVICE bool has(uint64_t ranks, int rank) { return ranks >> rank & 1; }

// Memory that a rank has published for the operation.
MC_DEVICE unsigned char* published(const GroupState& state, int rank, uint64_t number) {
  return state.data[rank] + (number & 1) * state.halfBytes;
}

MC_DEVICE uint64_t signalOf(const Exchange& exchange, uint64_t number) {
  return number << kCallBits | (exchange.call & ((1u << kCallBits) - 1));
}

// Publishes this block's part of each input, and signals that to the ranks that take part.
MC_DEVICE void publish(const Exchange& exchange, uint64_t number) {
  const GroupState& state = *exchange.state;
  const Part part = partOf(exchange.bytes, blockIdx.x, gridDim.x, 1024);
  unsigned char* const own = published(state, state.rank, number);
  for (unsigned i = 0; i < exchange.inputCount; ++i) {
    copyBytes(own + i * exchange.bytes + part.begin, exchange.inputs[i] + part.begin,
              part.end - part.begin);
  }
  __syncthreads();
  const int peer = int(threadIdx.x);
  if (peer < state.ranks && has(state.active, peer)) {
    storeReleaseSystem(&state.signals[peer]->words[blockIdx.x][state.rank],
                       signalOf(exchange, number));
  }
}

enum class Waited : uint32_t { kArrived, kStopped, kMismatch };

// Time between two looks at memory of the host, each of which takes as long as a signal.
constexpr uint64_t kLookNs = 20'000;

// Waits until the rank has signalled its part for the block.
MC_DEVICE Waited awaitSignal(const Exchange& exchange, uint64_t number, unsigned block, int peer,
                             uint64_t deadline) {
  const GroupState& state = *exchange.state;
  const uint64_t* const word = &state.signals[state.rank]->words[block][peer];
  const uint64_t expected = signalOf(exchange, number);
  uint64_t nextLook = now() + kLookNs;
  for (;;) {
    const uint64_t signal = loadAcquireSystem(word);
    if (signal == expected) return Waited::kArrived;
    // The signal of a later operation: the rank has ended this one, and has compared the calls.
    if (signal >> kCallBits > number) return Waited::kArrived;
    if (signal >> kCallBits == number) return Waited::kMismatch;
    const uint64_t time = now();
    if (time > deadline) return Waited::kStopped;
    if (time > nextLook) {
      if (loadRelaxedSystem(&state.host->stop) != state.generation) return Waited::kStopped;
      nextLook = time + kLookNs;
    }
    relax();
  }
}

// Shared memory of a block.
struct BlockState {
  Waited waited[kMaxBlocks * kMaxRanks];
  uint32_t arrived;  // of all blocks; see GroupState
  uint32_t decision;
  uint64_t missing;  // bits of the ranks that a wait has not seen
  int mismatched;    // a rank whose call differs; -1: none
};

// Waits until all blocks of all ranks that take part, also of this one, have published their parts.
// Returns the same on all threads of the block. If false, `shared` says why.
MC_DEVICE bool awaitAll(const Exchange& exchange, uint64_t number, uint64_t active,
                        uint64_t deadline, BlockState& shared) {
  const unsigned ranks = unsigned(exchange.state->ranks), signals = gridDim.x * ranks;
  bool haveArrived = true;
  for (unsigned i = threadIdx.x; i < signals; i += blockDim.x) {
    const int peer = int(i % ranks);
    shared.waited[i] = has(active, peer) ? awaitSignal(exchange, number, i / ranks, peer, deadline)
                                         : Waited::kArrived;
    haveArrived = haveArrived && shared.waited[i] == Waited::kArrived;
  }
  if (__syncthreads_and(haveArrived)) return true;
  if (threadIdx.x == 0) {
    shared.missing = 0;
    shared.mismatched = -1;
    for (unsigned i = 0; i < signals; ++i) {
      if (shared.waited[i] == Waited::kStopped) shared.missing |= uint64_t(1) << i % ranks;
      if (shared.waited[i] == Waited::kMismatch) shared.mismatched = int(i % ranks);
    }
  }
  __syncthreads();
  return false;
}

// The functions below are called by one thread of the last block.

MC_DEVICE void endOperation(GroupState& state, uint64_t number) {
  state.done = number;
  storeRelaxedSystem(&state.host->done, number);
}

MC_DEVICE void failGroup(GroupState& state, Failure failure, int rank) {
  state.failed = uint32_t(failure);
  state.host->failedRank = uint32_t(rank);
  storeReleaseSystem(&state.host->failed, uint32_t(failure));
}

// The ranks that take part become others. Tells the host from which operation on.
MC_DEVICE void change(GroupState& state, Decision decision, uint64_t active) {
  if (active == state.active) return;
  HostWords& host = *state.host;
  const uint32_t count = host.changeCount;
  host.changes[count] = {state.done + (decision == Decision::kTake), active};
  storeReleaseSystem(&host.changeCount, count + 1);
  state.active = active;
}

// Tells the host that this kernel has stopped, and waits for its decision, which takes effect.
// kRefuse if none comes.
MC_DEVICE Decision awaitDecision(GroupState& state, uint64_t missing, uint64_t deadline) {
  HostWords& host = *state.host;
  const uint32_t next = state.generation + 1;
  host.missing = missing;
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
  if (decision != Decision::kRefuse) change(state, decision, loadRelaxedSystem(&host.active));
  state.generation = decided;
  return decision;
}

// Asks the host how a stopped operation goes on. The decision takes effect.
MC_DEVICE Decision decide(GroupState& state, const BlockState& shared, uint64_t deadline) {
  if (shared.mismatched < 0) return awaitDecision(state, shared.missing, deadline);
  failGroup(state, Failure::kMismatch, shared.mismatched);
  return Decision::kRefuse;
}

// How a block's attempt to get the data has gone.
enum class Attempt : uint32_t { kAgain, kReady, kOver };

// The last block's attempt, in the place of blocks that have stopped.
MC_DEVICE Attempt awaitAlone(const Exchange& exchange, uint64_t number, uint64_t active,
                             uint64_t deadline, BlockState& shared) {
  if (awaitAll(exchange, number, active, deadline, shared)) return Attempt::kReady;
  if (threadIdx.x == 0) shared.decision = uint32_t(decide(*exchange.state, shared, deadline));
  __syncthreads();
  const Decision decision = Decision(shared.decision);
  if (decision == Decision::kRefuse) return Attempt::kOver;
  return decision == Decision::kTake ? Attempt::kReady : Attempt::kAgain;
}

enum class Arrival : uint32_t { kNotLast, kAllEnded, kSomeStopped };

// Counts the blocks that have ended their part, or have stopped. Tells the last one.
MC_DEVICE Arrival arrive(GroupState& state, bool hasEnded, BlockState& shared) {
  constexpr uint32_t kStopped = 1u << 16;
  const uint32_t mine = hasEnded ? 1 : 1 + kStopped;
  if (threadIdx.x == 0) shared.arrived = mine + addAcqRelDevice(&state.arrived, mine);
  __syncthreads();
  const uint32_t arrived = shared.arrived;
  if (arrived % kStopped != gridDim.x) return Arrival::kNotLast;
  if (threadIdx.x == 0) storeRelaxedDevice(&state.arrived, 0);
  return arrived < kStopped ? Arrival::kAllEnded : Arrival::kSomeStopped;
}

// The whole operation. `consume(state, number, active, block)` computes the block's part of the
// result from the memory of the ranks in `active`, with all threads of a block. It stands here only
// once, because it is most of a kernel's code.
template <typename Consume>
MC_DEVICE void exchangeAll(const Exchange& exchange, const Consume& consume) {
  MC_SHARED(BlockState, shared);
  GroupState& state = *exchange.state;
  if (state.failed) return;
  const uint64_t number = state.done + 1;
  uint64_t active = state.active;
  publish(exchange, number);
  uint64_t deadline = now() + state.patienceNs;
  unsigned first = blockIdx.x, end = blockIdx.x + 1;  // the blocks whose parts this one computes
  bool isAlone = false;
  const auto hasResult = [&] { return exchange.root < 0 || has(active, exchange.root); };
  Attempt attempt =
      awaitAll(exchange, number, active, deadline, shared) ? Attempt::kReady : Attempt::kAgain;
  for (;;) {
    if (attempt == Attempt::kReady && hasResult())
      for (unsigned block = first; block < end; ++block) consume(state, number, active, block);
    __syncthreads();
    if (!isAlone) {
      const Arrival arrival = arrive(state, attempt == Attempt::kReady, shared);
      if (arrival == Arrival::kNotLast) return;
      if (arrival == Arrival::kAllEnded) break;
      isAlone = true;
      first = 0;
      end = gridDim.x;
      deadline = now() + exchange.decisionNs;
    } else if (attempt == Attempt::kReady) {
      break;
    }
    active = state.active;
    attempt = awaitAlone(exchange, number, active, deadline, shared);
    if (attempt == Attempt::kOver) return;
  }
  if (threadIdx.x == 0) endOperation(state, number);
}

}  // namespace mooncake::kernels
