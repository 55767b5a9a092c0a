#pragma once

#include "kernels/exchange.cuh"

namespace mooncake::kernels {

// An operation in two kernels, so that nothing runs on the device while the data of other ranks
// come. The first: `write(own, block)` writes the block's part of the data that this rank
// publishes, and `push(pushes, block)` pushes it to a remote rank. Where the operation before was
// not received, it fails the group.
template <typename Write, typename Push>
MC_DEVICE void sendAll(const Exchange& exchange, const Write& write, const Push& push) {
  if (!beginBlock(exchange)) return;
  GroupState& state = *exchange.state;
  const Turn turn{state.serial + 1, 0, activeIn(state)};
  const bool isUnreceived = state.sent > state.serial;
  if (!isUnreceived) {
    write(bankAt(state, state.rank, turn.serial), blockIdx.x);
    // The second kernel pushes no data. No rank reads the data of a skipped rank.
    if (has(turn.active, state.rank))
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
  state.sentBlocks = exchange.isHeld ? gridDim.x : 0;
}

// Tells the host that the operation waits for ranks. One thread.
MC_DEVICE void tellSkip(const Exchange& exchange) {
  HostWords& host = *exchange.state->host;
  storeRelaxedSystem(&host.skipNs, exchange.skipNs);
  storeReleaseSystem(&host.waits, exchange.state->done + 1);
}

// The second, the group's next kernel. Its operation has one piece, so after a loss it has the same
// bank of the memory as before, where the data stand already, also in inboxes. `begin(turn)` runs
// on each block that has not stopped. If the group has failed, `entered` counts none of the blocks.
template <typename Begin, typename Consume, typename Finish>
MC_DEVICE void receiveAll(const Exchange& exchange, const Begin& begin, const Consume& consume,
                          const Finish& finish) {
  if (exchange.state->failed) return;
  runExchange(
      exchange, 0,
      [&](const Turn& turn, const Blocks& blocks) {
        if (!blocks.areStopped) {
          if (exchange.skipNs && blockIdx.x == 0 && threadIdx.x == 0) tellSkip(exchange);
          begin(turn);
        }
        if (blocks.areRedone) signalAll(exchange, turn, blocks, [](Pushes&, unsigned) {});
      },
      consume, finish);
}

}  // namespace mooncake::kernels
