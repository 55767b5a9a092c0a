#pragma once

#include "kernels/collectives.h"
#include "kernels/copy.cuh"
#include "kernels/device.h"
#include "kernels/group.cuh"
#include "kernels/pieces.cuh"
#include "kernels/remote.cuh"

// One operation of a group on GPUs: each rank publishes its inputs in memory that all ranks map,
// signals that, waits for the others' signals, and computes its result from their memory. This
// memory outlives its owner. So once one rank has ended an operation, every other rank can end it
// with the same data.
//
// No memory of a rank on another host is mapped: a rank pushes its data to the inboxes of remote
// ranks (kernels/remote.cuh). If it is lost, some may have all of them, and others none. So a group
// on several hosts has a second round: each rank tells the others that it has the data of all, and
// uses them once all have told so. A rank that still lacks this of a lost rank can take the
// operation, if any rank has ended it: then it has the data.
//
// Inputs that do not fit go in pieces, each by an exchange of its own. A rank publishes a piece
// when it has ended the one before, for which it needed the signals of all ranks. So all have ended
// the piece before that, which was in the same half of the memory.
//
// A two-shot operation has two exchanges for each piece. A rank that has the signals of the first
// one may already write to the half of the second one, for the same reason: there it reduces its
// segment of the piece. So it publishes the segment without a copy. A block that goes on for stopped
// ones may reduce a part again: other ranks read none before they have the signals of all blocks. An
// operation of one piece writes to its output in the last exchange only, so the output may be the
// input.
//
// A kernel does not wait for a lost or late rank for long. It stops, tells the host which ranks it
// misses, and waits for a decision with a deadline of its own. All blocks but one end, and that one
// goes on alone. If ranks are lost, all exchanges of the operation are redone, because all need the
// same ranks; or another rank has ended it, and then this one lacks the last exchange only.
namespace mooncake::kernels {

// Memory that a rank has published for an exchange, and its size.
MC_DEVICE unsigned char* published(const GroupState& state, int rank, uint64_t serial) {
  if (has(state.remote.ranks, rank)) return inboxOf(state.remote, rank, serial);
  return state.data[rank] + (serial & 1) * state.halfBytes;
}

MC_DEVICE size_t publishedBytes(const GroupState& state, int rank) {
  return has(state.remote.ranks, rank) ? state.remote.inboxHalfBytes : state.halfBytes;
}

MC_DEVICE uint64_t signalOf(const Exchange& exchange, uint64_t serial) {
  return serial << kCallBits | (exchange.call & ((1u << kCallBits) - 1));
}

// The blocks for which this one does the parts: [first, end).
struct Blocks {
  unsigned first, end;
  bool areStopped;  // they have stopped, and this one goes on in their place
  bool areRedone;   // the operation has begun anew since

  // Whether this block publishes the block's part of an exchange. Blocks have published that of the
  // exchange at which they have stopped.
  MC_DEVICE bool publish(const GroupState& state, unsigned block, unsigned exchange) const {
    return !areStopped || areRedone || state.progress[block] < exchange;
  }
  // Whether this block computes the block's part of the result. Others push parts of it already.
  MC_DEVICE bool compute(const GroupState& state, unsigned block, unsigned exchange) const {
    return !areStopped || areRedone || state.progress[block] <= exchange;
  }
};

// Pushes the blocks' parts to remote ranks, a warp for each rank: blocks that have stopped may have
// pushed theirs. `push(pushes, block)` pushes a part. If the kernel may stop, the block that goes on
// alone pushes the parts that are left.
template <typename Push>
MC_DEVICE void pushAll(const Exchange& exchange, const Turn& turn, const Blocks& blocks,
                       const Push& push, bool mayStop) {
  GroupState& state = *exchange.state;
  Remote& remote = state.remote;
  const uint64_t signal = signalOf(exchange, turn.serial);
  for (int peer = int(threadIdx.x / kLanes); peer < state.ranks; peer += int(blockDim.x / kLanes)) {
    if (!has(turn.active & remote.ranks, peer)) continue;
    // The commands of the exchange before the last one were in the same half.
    int isFree = 1;
    if (lane() == 0) isFree = awaitRing(state, peer, remote.used[turn.serial & 1][peer], mayStop);
    if (!__shfl_sync(kAllLanes, isFree, 0)) continue;
    for (unsigned block = blocks.first; block < blocks.end; ++block) {
      if (!lacksMail(remote, peer, MailKind::kData, turn.serial, block, signal)) continue;
      Pushes pushes{state, peer, block, turn.serial, pushedTo(remote, peer, block)};
      push(pushes, block);
      pushMail(pushes, MailKind::kData, signal);
    }
  }
  __syncthreads();
}

// Signals to the ranks that take part that the blocks' parts are published.
template <typename Push>
MC_DEVICE void signalAll(const Exchange& exchange, const Turn& turn, const Blocks& blocks,
                         const Push& push, bool mayStop = true) {
  const GroupState& state = *exchange.state;
  __syncthreads();
  // Before the signals: this rank's block 0 counts the commands of all blocks.
  if (state.remote.ranks) pushAll(exchange, turn, blocks, push, mayStop);
  const uint64_t local = turn.active & ~state.remote.ranks;
  const unsigned ranks = unsigned(state.ranks);
  for (unsigned i = threadIdx.x; i < (blocks.end - blocks.first) * ranks; i += blockDim.x) {
    const unsigned block = blocks.first + i / ranks;
    const int peer = int(i % ranks);
    if (has(local, peer) && blocks.publish(state, block, turn.number)) {
      storeReleaseSystem(&state.signals[peer]->words[block][state.rank],
                         signalOf(exchange, turn.serial));
    }
  }
}

// Pushes the block's part of each input, as far as the remote rank reads it, or of the own segment.
// One warp: a lane has an input.
MC_DEVICE void pushInputs(const Exchange& exchange, const Turn& turn, Pushes& pushes,
                          unsigned block) {
  static_assert(unsigned(kMaxRanks) <= kLanes);
  const GroupState& state = *exchange.state;
  const Part piece = pieceOf(exchange, turn, exchange.bytes);
  const size_t bytes = piece.end - piece.begin;
  const unsigned peer = unsigned(pushes.peer);
  Part part = partOf(bytes, block, gridDim.x, kPartBytes);
  bool isRead = lane() < exchange.inputCount;
  if (gathersSegments(exchange, turn)) {
    const Part own = segmentOf(turn.active, state.rank, bytes);
    part = partOf(own.end - own.begin, block, gridDim.x, kPartBytes);
    part = {own.begin + part.begin, own.begin + part.end};
  } else if (exchange.isTwoShot) {
    part = commonOf(part, segmentOf(turn.active, pushes.peer, bytes));
  } else if (exchange.readers == Readers::kRoot) {
    isRead = isRead && pushes.peer == exchange.root;
  } else if (exchange.readers == Readers::kOwnPart && exchange.inputCount > 1) {
    isRead = isRead && lane() == peer;
  } else if (exchange.readers == Readers::kOwnPart) {
    const size_t each = bytes / unsigned(state.ranks);
    part = commonOf(part, {peer * each, (peer + 1) * each});
  }
  const size_t begin = lane() * exchange.piece + part.begin;
  push(pushes, begin, begin, isRead ? part.end - part.begin : 0);
}

// Publishes the blocks' parts of each input, and signals that. Segments are published already.
MC_DEVICE void publish(const Exchange& exchange, const Turn& turn, const Blocks& blocks) {
  const GroupState& state = *exchange.state;
  const Part piece = pieceOf(exchange, turn, exchange.bytes);
  unsigned char* const own = published(state, state.rank, turn.serial);
  const unsigned end = gathersSegments(exchange, turn) ? blocks.first : blocks.end;
  for (unsigned block = blocks.first; block < end; ++block) {
    if (!blocks.publish(state, block, turn.number)) continue;
    const Part part = partOf(piece.end - piece.begin, block, gridDim.x, kPartBytes);
    for (unsigned i = 0; i < exchange.inputCount; ++i) {
      copyBytes(own + i * exchange.piece + part.begin,
                exchange.inputs[i] + piece.begin + part.begin, part.end - part.begin);
    }
  }
  signalAll(exchange, turn, blocks,
            [&](Pushes& pushes, unsigned block) { pushInputs(exchange, turn, pushes, block); });
}

enum class Waited : uint32_t { kArrived, kStopped, kMismatch };

// Time between two looks at memory of the host, each of which takes as long as a signal.
constexpr uint64_t kLookNs = 20'000;

// Waits for a rank's signal of an exchange, which `read()` returns.
template <typename Read>
MC_DEVICE Waited awaitFrom(const Exchange& exchange, uint64_t serial, int peer, uint64_t deadline,
                           const Read& read) {
  const GroupState& state = *exchange.state;
  const uint64_t expected = signalOf(exchange, serial);
  uint64_t nextLook = now() + kLookNs;
  for (;;) {
    const uint64_t signal = read();
    if (signal == expected) return Waited::kArrived;
    // The signal of a later exchange: the rank has ended this one, and has compared the calls.
    if (signal >> kCallBits > serial) return Waited::kArrived;
    if (signal >> kCallBits == serial) return Waited::kMismatch;
    const uint64_t time = now();
    if (time > deadline) return Waited::kStopped;
    if (time > nextLook) {
      if (loadRelaxedSystem(&state.host->stop) != state.generation) return Waited::kStopped;
      if (has(state.remote.ranks, peer) && isCutOff(state.remote, peer)) return Waited::kStopped;
      nextLook = time + kLookNs;
    }
    relax();
  }
}

// Waits until the rank has signalled its part for the block.
MC_DEVICE Waited awaitSignal(const Exchange& exchange, uint64_t serial, unsigned block, int peer,
                             uint64_t deadline) {
  const GroupState& state = *exchange.state;
  const uint64_t* const word = &state.signals[state.rank]->words[block][peer];
  const bool isRemote = has(state.remote.ranks, peer);
  return awaitFrom(exchange, serial, peer, deadline, [&] {
    return isRemote ? mailedSignal(state.remote, peer, MailKind::kData, serial, block)
                    : loadAcquireSystem(word);
  });
}

// Waits until the rank has signalled that it has all data of the exchange.
MC_DEVICE Waited awaitHasAll(const Exchange& exchange, uint64_t serial, int peer,
                             uint64_t deadline) {
  const GroupState& state = *exchange.state;
  const bool isRemote = has(state.remote.ranks, peer);
  return awaitFrom(exchange, serial, peer, deadline, [&] {
    return isRemote ? mailedSignal(state.remote, peer, MailKind::kHasAll, serial, 0)
                    : loadAcquireSystem(&state.signals[state.rank]->hasAll[peer]);
  });
}

// Shared memory of a block.
struct BlockState {
  Waited waited[kMaxBlocks * kMaxRanks];
  uint32_t arrived;  // of all blocks; see GroupState
  uint32_t decision;
  uint64_t missing;  // bits of the ranks that a wait has not seen
  int mismatched;    // a rank whose call differs; -1: none
};

// Waits for `signals`: each thread has waited for its own. Returns the same on all threads of the
// block. If false, `shared` says why.
MC_DEVICE bool haveAll(bool haveArrived, unsigned signals, unsigned ranks, BlockState& shared) {
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

// This rank has all data of an exchange. Tells the other ranks that take part. Block 0, or the one
// that goes on alone.
MC_DEVICE void signalHasAll(const Exchange& exchange, const Turn& turn) {
  GroupState& state = *exchange.state;
  Remote& remote = state.remote;
  const uint64_t signal = signalOf(exchange, turn.serial);
  for (int peer = int(threadIdx.x); peer < state.ranks; peer += int(blockDim.x)) {
    if (has(turn.active & ~remote.ranks, peer) && peer != state.rank)
      storeReleaseSystem(&state.signals[peer]->hasAll[state.rank], signal);
  }
  for (int peer = int(threadIdx.x / kLanes); peer < state.ranks; peer += int(blockDim.x / kLanes)) {
    if (!has(turn.active & remote.ranks, peer)) continue;
    if (lacksMail(remote, peer, MailKind::kHasAll, turn.serial, 0, signal)) {
      Pushes pushes{state, peer, 0, turn.serial, pushedTo(remote, peer, 0)};
      pushMail(pushes, MailKind::kHasAll, signal);
    }
    if (lane() == 0) {
      remote.used[turn.serial & 1][peer] = loadRelaxedDevice(&remote.proxy.tickets[peer].reserved);
    }
  }
}

// Waits until all blocks of all ranks that take part, also of this one, have published their parts,
// and with remote ranks until all have them. As haveAll().
MC_DEVICE bool awaitAll(const Exchange& exchange, const Turn& turn, const Blocks& blocks,
                        uint64_t deadline, BlockState& shared) {
  const GroupState& state = *exchange.state;
  const unsigned ranks = unsigned(state.ranks), signals = gridDim.x * ranks;
  bool haveArrived = true;
  for (unsigned i = threadIdx.x; i < signals; i += blockDim.x) {
    const int peer = int(i % ranks);
    shared.waited[i] = has(turn.active, peer)
                           ? awaitSignal(exchange, turn.serial, i / ranks, peer, deadline)
                           : Waited::kArrived;
    haveArrived = haveArrived && shared.waited[i] == Waited::kArrived;
  }
  if (!haveAll(haveArrived, signals, ranks, shared)) return false;
  if (!state.remote.ranks) return true;
  if (blocks.first == 0) signalHasAll(exchange, turn);
  for (unsigned peer = threadIdx.x; peer < ranks; peer += blockDim.x) {
    shared.waited[peer] = has(turn.active, int(peer)) && int(peer) != state.rank
                              ? awaitHasAll(exchange, turn.serial, int(peer), deadline)
                              : Waited::kArrived;
    haveArrived = haveArrived && shared.waited[peer] == Waited::kArrived;
  }
  return haveAll(haveArrived, ranks, ranks, shared);
}

// Asks the host how an operation goes on that has stopped in this turn. The decision takes effect.
MC_DEVICE Decision decide(const Exchange& exchange, const BlockState& shared, const Turn& turn,
                          uint64_t deadline) {
  GroupState& state = *exchange.state;
  if (shared.mismatched < 0)
    return awaitDecision(state, shared.missing, lastSerial(turn), exchange.isOfGraph, deadline);
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
MC_DEVICE Arrival arrive(const Exchange& exchange, const Turn& turn, BlockState& shared) {
  constexpr uint32_t kStopped = 1u << 16;
  GroupState& state = *exchange.state;
  const uint32_t mine = turn.number == turn.exchanges ? 1 : 1 + kStopped;
  if (threadIdx.x == 0) {
    state.progress[blockIdx.x] = turn.number;
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
// signals that. `consume(state, turn, block)` computes the block's part of an exchange's result from
// the memory of the ranks that take part. It stands here only once, because it is most of the code.
// That of the first exchange may set the number of exchanges, the same on all ranks.
// `bytes`: size of the operation's result. `finish(last)` runs on the last block, when the operation
// cannot begin anew any more, with its last exchange; false: it has failed the group. All have all
// threads of a block.
template <typename Publish, typename Consume, typename Finish>
MC_DEVICE void runExchange(const Exchange& exchange, size_t bytes, const Publish& publish,
                           const Consume& consume, const Finish& finish) {
  MC_SHARED(BlockState, shared);
  GroupState& state = *exchange.state;
  Turn turn{state.serial + 1, 0, state.active, exchangesOf(exchange)};
  Blocks blocks{blockIdx.x, blockIdx.x + 1, false, false};
  uint64_t deadline = now() + state.patienceNs;
  for (;;) {
    publish(turn, blocks);
    bool isReady = awaitAll(exchange, turn, blocks, deadline, shared);
    if (!isReady && blocks.areStopped) {
      const Decision decision = decideForAll(exchange, shared, turn, deadline);
      if (decision == Decision::kRefuse) {
        if (threadIdx.x == 0) leave(exchange, gridDim.x);
        return;
      }
      isReady = decision == Decision::kTake;
      if (!isReady) {
        turn = {state.serial + 1, 0, state.active, exchangesOf(exchange)};
        blocks.areRedone = true;
        if (state.remote.ranks) awaitRings(state);
        continue;
      }
    }
    if (isReady) {
      const bool hasResult = exchange.root < 0 || has(turn.active, exchange.root);
      for (unsigned block = blocks.first; hasResult && block < blocks.end; ++block)
        if (blocks.compute(state, block, turn.number)) consume(state, turn, block);
      __syncthreads();
      ++turn.number;
      ++turn.serial;
      if (turn.number < turn.exchanges) {
        if (!blocks.areStopped) deadline = now() + state.patienceNs;
        continue;
      }
      if (hasResult && exchange.scratch) commit(exchange, blocks, bytes);
      __syncthreads();
      if (blocks.areStopped) break;
    }
    const Arrival arrival = arrive(exchange, turn, shared);
    if (arrival == Arrival::kNotLast) return;
    if (arrival == Arrival::kAllEnded) break;
    if (exchange.isOfGraph && threadIdx.x == 0)
      storeRelaxedSystem(&state.host->parked, state.done + 1);
    blocks = {0, gridDim.x, true, false};
    const unsigned number = leastProgress(state);
    turn.serial -= turn.number - number;
    turn.number = number;
    deadline = now() + exchange.decisionNs;
  }
  const Turn last{lastSerial(turn), turn.exchanges - 1, turn.active, turn.exchanges};
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
  if (exchange.isOfGraph) enter(*exchange.state);
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

// An operation in two kernels, so that nothing runs on the device while the data of other ranks
// come. The first: `write(own, block)` writes the block's part of the data that this rank publishes,
// and `push(pushes, block)` pushes it to a remote rank. Where the operation before was not received,
// it fails the group.
template <typename Write, typename Push>
MC_DEVICE void sendAll(const Exchange& exchange, const Write& write, const Push& push) {
  if (!beginBlock(exchange)) return;
  GroupState& state = *exchange.state;
  const Turn turn{state.serial + 1, 0, state.active};
  const bool isUnreceived = state.sent > state.serial;
  if (!isUnreceived) {
    write(published(state, state.rank, turn.serial), blockIdx.x);
    // The second kernel pushes no data.
    signalAll(exchange, turn, {blockIdx.x, blockIdx.x + 1, false, false}, push, false);
  }
  __syncthreads();
  if (threadIdx.x != 0 || addAcqRelDevice(&state.arrived, 1) + 1 != gridDim.x) return;
  storeRelaxedDevice(&state.arrived, 0);
  if (isUnreceived) {
    failGroup(state, Failure::kUnreceived, state.rank);
    leave(exchange, gridDim.x);
    addAcqRelDevice(&state.entered, 0u - state.sentBlocks);
    return;
  }
  state.sent = turn.serial;
  state.sentBlocks = exchange.isOfGraph ? gridDim.x : 0;
}

// The second, the group's next kernel. Its operation has one piece, so after a loss it has the same
// half of the memory as before, where the data stand already, also in inboxes. `begin(turn)` runs on
// each block that has not stopped. If the group has failed, `entered` counts none of the blocks.
template <typename Begin, typename Consume, typename Finish>
MC_DEVICE void receiveAll(const Exchange& exchange, const Begin& begin, const Consume& consume,
                          const Finish& finish) {
  if (exchange.state->failed) return;
  runExchange(
      exchange, 0,
      [&](const Turn& turn, const Blocks& blocks) {
        if (!blocks.areStopped) begin(turn);
        if (blocks.areRedone) signalAll(exchange, turn, blocks, [](Pushes&, unsigned) {});
      },
      consume, finish);
}

}  // namespace mooncake::kernels
