#pragma once

#include "kernels/collectives.h"
#include "kernels/copy.cuh"
#include "kernels/device.h"
#include "kernels/group.cuh"
#include "kernels/pieces.cuh"
#include "kernels/remote.cuh"

// How a rank publishes its data for an exchange (exchange.cuh), and signals that.
namespace mooncake::kernels {

// Memory that a rank has published for an exchange, and its size.
MC_DEVICE unsigned char* bankAt(const GroupState& state, int rank, uint64_t serial) {
  if (has(state.remote.ranks, rank)) return inboxOf(state, rank, serial);
  return state.data[rank] + bankOf(serial, state.banks) * state.bankBytes;
}

MC_DEVICE size_t bankBytesOf(const GroupState& state, int rank) {
  return has(state.remote.ranks, rank) ? state.remote.inboxBankBytes : state.bankBytes;
}

// The rank of `to`'s host that receives the data of rank `from`, which are for all ranks there. It
// follows from the ranks that take part. The ranks of a host send to another host's ranks in turn.
MC_DEVICE int receiverOf(const Remote& remote, uint64_t active, int from, int to) {
  uint64_t theirs = active & remote.hosts[to];
  const uint64_t before = active & remote.hosts[from] & ((uint64_t(1) << from) - 1);
  for (int left = countOf(before) % countOf(theirs); left > 0; --left) theirs &= theirs - 1;
  return __ffs(int(theirs)) - 1;
}

// Whether this rank pushes its data of an exchange to a remote rank.
MC_DEVICE bool receives(const Exchange& exchange, const Turn& turn, int peer) {
  const GroupState& state = *exchange.state;
  return !areForAll(exchange, turn) ||
         receiverOf(state.remote, turn.active, state.rank, peer) == peer;
}

// The memory where this rank reads the data of a rank that takes part: published memory, its own
// inbox, or the inbox of another rank of its host.
MC_DEVICE unsigned char* dataOf(const Exchange& exchange, const Turn& turn, int rank) {
  const GroupState& state = *exchange.state;
  const Remote& remote = state.remote;
  unsigned char* const data = bankAt(state, rank, turn.serial);
  if (!has(remote.ranks, rank) || !areForAll(exchange, turn)) return data;
  const int receiver = receiverOf(remote, turn.active, rank, state.rank);
  return remote.regions[receiver] + (data - remote.regions[state.rank]);
}

MC_DEVICE uint64_t signalOf(const Exchange& exchange, uint64_t serial) {
  return serial << kCallBits | (exchange.call & ((1u << kCallBits) - 1));
}

// The blocks for which this one does the parts: [first, end).
struct Blocks {
  unsigned first, end;
  bool areStopped;  // they have stopped, and this one goes on in their place
  bool areRedone;   // the operation has begun anew since

  // Whether this block publishes the block's part of an exchange.
  MC_DEVICE bool publish(const GroupState& state, unsigned block, unsigned exchange) const {
    return !areStopped || areRedone || state.publishedExchanges[block] <= exchange;
  }
  // Whether this block computes the block's part of the result. Other blocks push parts of it
  // already.
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
    // Commands of an earlier exchange were in the same bank.
    const unsigned bank = bankOf(turn.serial, state.banks);
    int isFree = 1;
    if (lane() == 0) isFree = awaitRing(state, peer, remote.used[bank][peer], mayStop);
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

// Pushes the block's part of each input, as far as the remote rank receives it, or of the own
// segment. One warp: a lane has an input.
MC_DEVICE void pushInputs(const Exchange& exchange, const Turn& turn, Pushes& pushes,
                          unsigned block) {
  static_assert(unsigned(kMaxRanks) <= kLanes);
  const GroupState& state = *exchange.state;
  const Part piece = pieceOf(exchange, turn, exchange.bytes);
  const size_t bytes = piece.end - piece.begin;
  const unsigned peer = unsigned(pushes.peer);
  Part part = partOf(bytes, block, gridDim.x, kPartBytes);
  bool isRead = lane() < exchange.inputCount && receives(exchange, turn, pushes.peer);
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
  unsigned char* const own = bankAt(state, state.rank, turn.serial);
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

}  // namespace mooncake::kernels
