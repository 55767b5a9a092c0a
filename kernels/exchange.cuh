#pragma once

#include "kernels/arrival.cuh"
#include "kernels/publish.cuh"

// One operation of a group on GPUs: each rank publishes its inputs in memory that all ranks map,
// signals that, waits for the other ranks' signals, and computes its result from their memory.
// This memory outlives its owner. So once one rank has ended an operation, every other rank can end
// it with the same data.
//
// No memory of a rank on another host is mapped: a rank pushes its data to the inboxes of remote
// ranks (kernels/remote.cuh). If it is lost, some ranks may have all of them, and some none. So a
// group on several hosts has a second round: each rank tells the other ranks that it has all data
// that it receives, and uses them once all have told so. A rank that still lacks this of a lost
// rank can take the operation, if any rank has ended it: then the data are there.
//
// Data that all ranks read cross to another host once: to the inbox of one of its ranks, which the
// other ranks of its host map. The second round tells them that the data are there, and this memory
// outlives its owner, too.
//
// Inputs that do not fit go in pieces, each by an exchange of its own. Consecutive exchanges take
// turns with three banks of the published memory and of the inboxes. A block that has the signals
// of all ranks for an exchange first publishes the next one, and then uses the data: so the next
// piece crosses to other hosts meanwhile. When all blocks of all ranks have published exchange n,
// they have had the signals for n - 1 before, and have ended n - 2 before that. So n + 1 may have
// its bank. Of one block, in time:
//
//   publish 0  wait 0  publish 1  use 0  wait 1  publish 2  use 1  wait 2  publish 3  use 2  wait 3
//   |--- bank 0: other ranks read 0 ----------------------------------->|  |--- bank 0: 3 --
//                      |--- bank 1: other ranks read 1 ------------------------------------>|  |--
//                                              |--- bank 2: other ranks read 2 --------------------
//
// The end of "wait 2" is the proof: all blocks of all ranks have published 2, so none reads 0.
//
// A rank that the survivors count as lost may still read in inboxes of its host. If n is the last
// exchange of which they have told that they have all data, that rank had published n. So it may
// read n - 1 and n, and the first exchange without that rank has the bank of n + 1. For the second
// one there are signals of all ranks, and the ranks of its host have told it before that it is out.
//
// Rows of experts have two banks only, and no exchange is published ahead: a rank has ended the one
// before, for which it needed the signals of all ranks. So all have ended the one before that, and
// a rank that is out may read n only.
//
// A two-shot operation has two exchanges for each piece. A rank that has the signals of the first
// one may already write to the bank of the second one, for the same reason: there it reduces its
// segment of the piece. So it publishes the segment without a copy, and not ahead. A block that
// goes on for stopped ones may reduce a part again: other ranks read none before they have the
// signals of all blocks. An operation of one piece writes to its output in the last exchange only,
// so the output may be the input.
//
// A kernel does not wait for a lost or late rank for long. It stops, tells the host which ranks it
// misses, and waits for a decision with a deadline of its own. All blocks but one end, and that one
// goes on alone. If ranks are lost, all exchanges of the operation are redone, because all need the
// same ranks; or another rank has ended it, and then this one lacks the last exchange only. It has
// told that it has all data of that one, and the data of earlier exchanges have come ahead of them.
//
// Where late ranks may be skipped (Exchange::skipNs), an operation has one exchange and two banks.
// The hosts of all ranks stop their kernels, and find the ranks that have not begun the operation:
// the other ranks do it without them. The kernel of a skipped rank ends at once when it comes. So
// no rank is more than one operation ahead of the ranks that it waits for, and the banks are used
// as above.
namespace mooncake::kernels {

// Asks the host how an operation goes on that has stopped in this turn. The decision takes effect.
MC_DEVICE Decision decide(const Exchange& exchange, const BlockState& shared, const Turn& turn,
                          uint64_t deadline) {
  GroupState& state = *exchange.state;
  if (shared.mismatched < 0) {
    // Rows of experts are not pushed again, so they stay in their bank.
    const bool readsOthers = exchange.isTwoShot || exchange.readers == Readers::kAll;
    const Progress progress{state.done + 1, lastSerial(turn), readsOthers ? state.hadAll : 0};
    return awaitDecision(state, shared.missing, progress, exchange.isOfGraph, deadline);
  }
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

// This block has ended, or has stopped, before this exchange. Tells the last block.
MC_DEVICE Arrival arrive(const Exchange& exchange, const Turn& turn, unsigned announced,
                         BlockState& shared) {
  constexpr uint32_t kStopped = 1u << 16;
  GroupState& state = *exchange.state;
  const uint32_t mine = turn.number == turn.exchanges ? 1 : 1 + kStopped;
  if (threadIdx.x == 0) {
    state.progress[blockIdx.x] = turn.number;
    state.publishedExchanges[blockIdx.x] = announced;
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
// exchange, all ranks have published their data for it, and the operation cannot begin anew.
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

// An operation from its first exchange on. `publish(turn, blocks)` publishes the blocks' parts and
// signals that. `consume(state, turn, block)` computes the block's part of an exchange's result
// from the memory of the ranks that take part. It stands here only once, because it is most of the
// code. In the first exchange it may set the number of exchanges, the same on all ranks. `bytes`:
// size of the operation's result. `finish(last)` runs on the last block, when the operation cannot
// begin anew any more, with its last exchange; false: it has failed the group. All have all threads
// of a block.
template <typename Publish, typename Consume, typename Finish>
MC_DEVICE void runExchange(const Exchange& exchange, size_t bytes, const Publish& publish,
                           const Consume& consume, const Finish& finish) {
  MC_SHARED(BlockState, shared);
  GroupState& state = *exchange.state;
  Turn turn{state.serial + 1, 0, activeIn(state), exchangesOf(exchange), shared.data};
  Blocks blocks{blockIdx.x, blockIdx.x + 1, false, false};
  uint64_t deadline = now() + state.patienceNs;
  unsigned announced = 0;  // exchanges that the blocks have published
  bool hasData = false;    // of the exchange in `turn`
  for (;;) {
    for (int rank = int(threadIdx.x); !hasData && rank < state.ranks; rank += int(blockDim.x))
      if (has(turn.active, rank)) shared.data[rank] = dataOf(exchange, turn, rank);
    // A rank that is skipped signals nothing and reads nothing.
    const bool takesPart = has(turn.active, state.rank);
    const Turn next = hasData ? after(turn) : turn;
    if (takesPart && announced <= next.number && (!hasData || isAhead(exchange, next))) {
      publish(next, blocks);
      announced = next.number + 1;
    }
    bool isReady = !takesPart || (hasData ? awaitUse(exchange, turn, deadline, shared)
                                          : awaitData(exchange, turn, blocks, deadline, shared));
    if (isReady && takesPart && !hasData) {
      hasData = true;
      continue;
    }
    if (!isReady && blocks.areStopped) {
      const Decision decision = decideForAll(exchange, shared, turn, deadline);
      if (decision == Decision::kRefuse) {
        if (threadIdx.x == 0) leave(exchange, gridDim.x);
        return;
      }
      isReady = decision == Decision::kTake;
      if (!isReady) {
        turn = {state.serial + 1, 0, activeIn(state), exchangesOf(exchange), shared.data};
        blocks.areRedone = true;
        announced = 0;
        hasData = false;
        if (state.remote.ranks) awaitRings(state);
        continue;
      }
    }
    if (isReady) {
      const bool hasResult = exchange.root < 0 || has(turn.active, exchange.root);
      for (unsigned block = blocks.first; hasResult && block < blocks.end; ++block)
        if (blocks.compute(state, block, turn.number)) consume(state, turn, block);
      __syncthreads();
      turn = after(turn);
      hasData = false;
      if (turn.number < turn.exchanges) {
        if (!blocks.areStopped) deadline = now() + state.patienceNs;
        continue;
      }
      if (hasResult && exchange.scratch) commit(exchange, blocks, bytes);
      __syncthreads();
      if (blocks.areStopped) break;
    }
    const Arrival arrival = arrive(exchange, turn, announced, shared);
    if (arrival == Arrival::kNotLast) return;
    if (arrival == Arrival::kAllEnded) break;
    if (exchange.isOfGraph && threadIdx.x == 0)
      storeRelaxedSystem(&state.host->parked, state.done + 1);
    blocks = {0, gridDim.x, true, false};
    const unsigned number = leastProgress(state);
    turn.serial -= turn.number - number;
    turn.number = announced = number;
    hasData = false;
    deadline = now() + exchange.decisionNs;
  }
  const Turn last{lastSerial(turn), turn.exchanges - 1, turn.active, turn.exchanges, shared.data};
  const bool hasSucceeded = finish(last);
  if (threadIdx.x != 0) return;
  if (hasSucceeded && isOut(state)) {
    failGroup(state, Failure::kOut, state.rank);
  } else if (hasSucceeded) {
    endOperation(exchange, last.serial);
  }
  leave(exchange, gridDim.x);
}

// A block begins an operation. False: the group has ended, and so does the block. All threads.
MC_DEVICE bool beginBlock(const Exchange& exchange) {
  if (exchange.isHeld) enter(*exchange.state);
  if (!exchange.state->failed) return true;
  if (threadIdx.x == 0) leave(exchange, 1);
  return false;
}

// A whole operation in one kernel.
template <typename Consume>
MC_DEVICE void exchangeAll(const Exchange& exchange, size_t bytes, const Consume& consume) {
  if (!beginBlock(exchange)) return;
  runExchange(
      exchange, bytes,
      [&](const Turn& turn, const Blocks& blocks) { publish(exchange, turn, blocks); }, consume,
      [](const Turn&) { return true; });
}

}  // namespace mooncake::kernels
