#pragma once

#include "kernels/collectives.h"
#include "kernels/copy.cuh"
#include "kernels/device.h"
#include "kernels/group_state.h"

// One operation of a group on GPUs of one host: each rank publishes its inputs in memory that all
// ranks map, signals that, waits for the others' signals, and computes its result from their
// memory. This memory outlives its owner. So once one rank has ended an operation, every other rank
// can end it with the same data.
//
// Inputs that do not fit go in pieces, each by an exchange of its own. A rank publishes a piece
// when it has ended the one before, for which it needed the signals of all ranks. So all have ended
// the piece before that, which was in the same half of the memory.
//
// A kernel does not wait for a lost or late rank for long. It stops, tells the host which ranks it
// misses, and waits for a decision with a deadline of its own. All blocks but one end, and that one
// goes on alone. If ranks are lost, all pieces of the operation are redone, because all need the
// same ranks; or another rank has ended it, and then this one lacks the last piece only.
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

// Parts of blocks begin at multiples of so many bytes.
constexpr size_t kPartBytes = 1024;

// A piece of `bytes`.
MC_DEVICE Part pieceOf(const Exchange& exchange, unsigned piece, size_t bytes) {
  const size_t begin = piece * exchange.piece, end = begin + exchange.piece;
  return {begin < bytes ? begin : bytes, end < bytes ? end : bytes};
}

MC_DEVICE bool has(uint64_t ranks, int rank) { return ranks >> rank & 1; }

// One exchange of an operation.
struct Turn {
  uint64_t serial;
  unsigned piece;
  uint64_t active;  // bits of the ranks that take part
};

// Serial number of the operation's last exchange. Computed from the turn, because the kernels that
// reduce have no register to spare for it.
MC_DEVICE uint64_t lastSerial(const Exchange& exchange, const Turn& turn) {
  return turn.serial - turn.piece + exchange.pieces - 1;
}

// Memory that a rank has published for an exchange.
MC_DEVICE unsigned char* published(const GroupState& state, int rank, uint64_t serial) {
  return state.data[rank] + (serial & 1) * state.halfBytes;
}

MC_DEVICE uint64_t signalOf(const Exchange& exchange, uint64_t serial) {
  return serial << kCallBits | (exchange.call & ((1u << kCallBits) - 1));
}

// The blocks for which this one does the parts: [first, end).
struct Blocks {
  unsigned first, end;
  bool areStopped;  // they have stopped, and this one goes on in their place
  bool areRedone;   // the operation has begun anew since

  // Whether this block publishes a piece for another. Blocks have published the one that they have
  // stopped at.
  MC_DEVICE bool publish(const GroupState& state, unsigned block, unsigned piece) const {
    return !areStopped || areRedone || state.progress[block] < piece;
  }
};

// Publishes the blocks' parts of each input, and signals that to the ranks that take part.
MC_DEVICE void publish(const Exchange& exchange, const Turn& turn, const Blocks& blocks) {
  const GroupState& state = *exchange.state;
  const Part piece = pieceOf(exchange, turn.piece, exchange.bytes);
  unsigned char* const own = published(state, state.rank, turn.serial);
  for (unsigned block = blocks.first; block < blocks.end; ++block) {
    if (!blocks.publish(state, block, turn.piece)) continue;
    const Part part = partOf(piece.end - piece.begin, block, gridDim.x, kPartBytes);
    for (unsigned i = 0; i < exchange.inputCount; ++i) {
      copyBytes(own + i * exchange.piece + part.begin,
                exchange.inputs[i] + piece.begin + part.begin, part.end - part.begin);
    }
  }
  __syncthreads();
  const unsigned ranks = unsigned(state.ranks);
  for (unsigned i = threadIdx.x; i < (blocks.end - blocks.first) * ranks; i += blockDim.x) {
    const unsigned block = blocks.first + i / ranks;
    const int peer = int(i % ranks);
    if (has(turn.active, peer) && blocks.publish(state, block, turn.piece)) {
      storeReleaseSystem(&state.signals[peer]->words[block][state.rank],
                         signalOf(exchange, turn.serial));
    }
  }
}

enum class Waited : uint32_t { kArrived, kStopped, kMismatch };

// Time between two looks at memory of the host, each of which takes as long as a signal.
constexpr uint64_t kLookNs = 20'000;

// Waits until the rank has signalled its part for the block.
MC_DEVICE Waited awaitSignal(const Exchange& exchange, uint64_t serial, unsigned block, int peer,
                             uint64_t deadline) {
  const GroupState& state = *exchange.state;
  const uint64_t* const word = &state.signals[state.rank]->words[block][peer];
  const uint64_t expected = signalOf(exchange, serial);
  uint64_t nextLook = now() + kLookNs;
  for (;;) {
    const uint64_t signal = loadAcquireSystem(word);
    if (signal == expected) return Waited::kArrived;
    // The signal of a later exchange: the rank has ended this one, and has compared the calls.
    if (signal >> kCallBits > serial) return Waited::kArrived;
    if (signal >> kCallBits == serial) return Waited::kMismatch;
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
MC_DEVICE bool awaitAll(const Exchange& exchange, const Turn& turn, uint64_t deadline,
                        BlockState& shared) {
  const unsigned ranks = unsigned(exchange.state->ranks), signals = gridDim.x * ranks;
  bool haveArrived = true;
  for (unsigned i = threadIdx.x; i < signals; i += blockDim.x) {
    const int peer = int(i % ranks);
    shared.waited[i] = has(turn.active, peer)
                           ? awaitSignal(exchange, turn.serial, i / ranks, peer, deadline)
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

// A block of a graph's kernel begins: not while acknowledge() holds the group, so that the host's
// decision lies between two operations. That ends with a deadline of its own. All threads.
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

// So many blocks, which have all entered, use the state no more. One thread.
MC_DEVICE void leave(const Exchange& exchange, uint32_t blocks) {
  if (exchange.isOfGraph) addAcqRelDevice(&exchange.state->entered, 0u - blocks);
}

// The functions below are called by one thread of the last block.

MC_DEVICE void endOperation(const Exchange& exchange, uint64_t serial) {
  GroupState& state = *exchange.state;
  // A decision may have moved it on.
  if (state.serial < serial) state.serial = serial;
  storeRelaxedSystem(&state.host->done, ++state.done);
  if (!exchange.isOfGraph) storeRelaxedSystem(&state.host->calls, ++state.calls);
}

MC_DEVICE void failGroup(GroupState& state, Failure failure, int rank) {
  state.failed = uint32_t(failure);
  state.host->failedRank = uint32_t(rank);
  storeReleaseSystem(&state.host->failed, uint32_t(failure));
}

// The ranks that take part become others. Tells the host from which operation on.
MC_DEVICE void change(GroupState& state, Decision decision, bool isOfGraph, uint64_t active) {
  if (active == state.active) return;
  HostWords& host = *state.host;
  const uint32_t count = host.changeCount;
  const bool takes = decision == Decision::kTake;
  host.changes[count] = {state.done + takes, state.calls + (takes && !isOfGraph), active};
  storeReleaseSystem(&host.changeCount, count + 1);
  state.active = active;
}

// Tells the host that this kernel has stopped, and waits for its decision, which takes effect.
// `taken`: the last serial number that the operation may have used. kRefuse if no decision comes.
MC_DEVICE Decision awaitDecision(GroupState& state, uint64_t missing, uint64_t taken,
                                 bool isOfGraph, uint64_t deadline) {
  HostWords& host = *state.host;
  const uint32_t next = state.generation + 1;
  host.missing = missing;
  host.ended = state.serial;
  host.taken = taken;
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
  }
  state.generation = decided;
  return decision;
}

// Asks the host how an operation goes on that has stopped in this turn. The decision takes effect.
MC_DEVICE Decision decide(const Exchange& exchange, const BlockState& shared, const Turn& turn,
                          uint64_t deadline) {
  GroupState& state = *exchange.state;
  if (shared.mismatched < 0)
    return awaitDecision(state, shared.missing, lastSerial(exchange, turn), exchange.isOfGraph,
                         deadline);
  failGroup(state, Failure::kMismatch, shared.mismatched);
  return Decision::kRefuse;
}

MC_DEVICE Decision decideForAll(const Exchange& exchange, BlockState& shared, const Turn& turn,
                                uint64_t deadline) {
  if (threadIdx.x == 0) shared.decision = uint32_t(decide(exchange, shared, turn, deadline));
  __syncthreads();
  return Decision(shared.decision);
}

enum class Arrival : uint32_t { kNotLast, kAllEnded, kSomeStopped };

// This block has ended, or has stopped, after so many pieces. Tells the last block.
MC_DEVICE Arrival arrive(const Exchange& exchange, unsigned pieces, BlockState& shared) {
  constexpr uint32_t kStopped = 1u << 16;
  GroupState& state = *exchange.state;
  const uint32_t mine = pieces == exchange.pieces ? 1 : 1 + kStopped;
  if (threadIdx.x == 0) {
    state.progress[blockIdx.x] = pieces;
    shared.arrived = mine + addAcqRelDevice(&state.arrived, mine);
  }
  __syncthreads();
  const uint32_t arrived = shared.arrived;
  if (arrived % kStopped != gridDim.x) return Arrival::kNotLast;
  if (threadIdx.x == 0) storeRelaxedDevice(&state.arrived, 0);
  return arrived < kStopped ? Arrival::kAllEnded : Arrival::kSomeStopped;
}

MC_DEVICE unsigned leastProgress(const GroupState& state) {
  unsigned least = state.progress[0];
  for (unsigned block = 1; block < gridDim.x; ++block)
    if (state.progress[block] < least) least = state.progress[block];
  return least;
}

// Copies the blocks' results from the scratch memory. Once a block of one rank has ended the last
// piece, all ranks have published it, and the operation cannot begin anew.
MC_DEVICE void commit(const Exchange& exchange, const Blocks& blocks, size_t bytes) {
  for (unsigned i = 0; i < exchange.pieces; ++i) {
    const Part piece = pieceOf(exchange, i, bytes);
    for (unsigned block = blocks.first; block < blocks.end; ++block) {
      const Part part = partOf(piece.end - piece.begin, block, gridDim.x, kPartBytes);
      const size_t begin = piece.begin + part.begin;
      copyBytes(exchange.output + begin, exchange.scratch + begin, part.end - part.begin);
    }
  }
}

// The whole operation. `consume(state, turn, block)` computes the block's part of a piece of the
// result, of `bytes` in all, from the memory of the ranks that take part, with all threads of a
// block. It stands here only once, because it is most of a kernel's code.
template <typename Consume>
MC_DEVICE void exchangeAll(const Exchange& exchange, size_t bytes, const Consume& consume) {
  MC_SHARED(BlockState, shared);
  GroupState& state = *exchange.state;
  if (exchange.isOfGraph) enter(state);
  if (state.failed) {
    if (threadIdx.x == 0) leave(exchange, 1);
    return;
  }
  Turn turn{state.serial + 1, 0, state.active};
  Blocks blocks{blockIdx.x, blockIdx.x + 1, false, false};
  uint64_t deadline = now() + state.patienceNs;
  for (;;) {
    publish(exchange, turn, blocks);
    bool isReady = awaitAll(exchange, turn, deadline, shared);
    if (!isReady && blocks.areStopped) {
      const Decision decision = decideForAll(exchange, shared, turn, deadline);
      if (decision == Decision::kRefuse) {
        if (threadIdx.x == 0) leave(exchange, gridDim.x);
        return;
      }
      isReady = decision == Decision::kTake;
      if (!isReady) {
        turn = {state.serial + 1, 0, state.active};
        blocks.areRedone = true;
        continue;
      }
    }
    if (isReady) {
      const bool hasResult = exchange.root < 0 || has(turn.active, exchange.root);
      for (unsigned block = blocks.first; hasResult && block < blocks.end; ++block)
        consume(state, turn, block);
      __syncthreads();
      ++turn.piece;
      ++turn.serial;
      if (turn.piece < exchange.pieces) {
        if (!blocks.areStopped) deadline = now() + state.patienceNs;
        continue;
      }
      if (hasResult && exchange.scratch) commit(exchange, blocks, bytes);
      __syncthreads();
      if (blocks.areStopped) break;
    }
    const Arrival arrival = arrive(exchange, turn.piece, shared);
    if (arrival == Arrival::kNotLast) return;
    if (arrival == Arrival::kAllEnded) break;
    if (exchange.isOfGraph && threadIdx.x == 0)
      storeRelaxedSystem(&state.host->parked, state.done + 1);
    blocks = {0, gridDim.x, true, false};
    const unsigned piece = leastProgress(state);
    turn.serial -= turn.piece - piece;
    turn.piece = piece;
    deadline = now() + exchange.decisionNs;
  }
  if (threadIdx.x != 0) return;
  endOperation(exchange, lastSerial(exchange, turn));
  leave(exchange, gridDim.x);
}

}  // namespace mooncake::kernels
