#pragma once

#include "kernels/publish.cuh"

// How a rank waits for the data of the other ranks in an exchange (exchange.cuh).
namespace mooncake::kernels {

enum class Waited : uint32_t { kArrived, kStopped, kMismatch };

// Waits for a rank's signal of an exchange, which `read()` returns.
template <typename Read>
MC_DEVICE Waited awaitFrom(const Exchange& exchange, uint64_t serial, int peer, uint64_t deadline,
                           const Read& read) {
  const GroupState& state = *exchange.state;
  const uint64_t expected = signalOf(exchange, serial);
  uint64_t nextLook = now() + kHostLookNs;
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
      nextLook = time + kHostLookNs;
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
  unsigned char* data[kMaxRanks];  // see Turn
  uint32_t arrived;                // of all blocks; see GroupState
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

// This rank has all data that it receives in an exchange. Tells the other ranks that take part. Block
// 0, or the one that goes on alone.
MC_DEVICE void signalHasAll(const Exchange& exchange, const Turn& turn) {
  GroupState& state = *exchange.state;
  Remote& remote = state.remote;
  const uint64_t signal = signalOf(exchange, turn.serial);
  // A block that goes on alone may come to an exchange of which another block has told this.
  const bool isTold = state.hadAll >= turn.serial;
  __syncthreads();
  if (isTold) return;
  if (threadIdx.x == 0) state.hadAll = turn.serial;
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
      remote.used[bankOf(turn.serial, state.banks)][peer] =
          loadRelaxedDevice(&remote.proxy.tickets[peer].reserved);
    }
  }
}

// Waits until all blocks of all ranks that take part, also of this one, have published their parts.
// With remote ranks, tells that this rank has all data. As haveAll().
MC_DEVICE bool awaitData(const Exchange& exchange, const Turn& turn, const Blocks& blocks,
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
  if (state.remote.ranks && blocks.first == 0) signalHasAll(exchange, turn);
  return true;
}

// Waits, with remote ranks, until all ranks that take part have all data. As haveAll().
MC_DEVICE bool awaitUse(const Exchange& exchange, const Turn& turn, uint64_t deadline,
                        BlockState& shared) {
  const GroupState& state = *exchange.state;
  if (!state.remote.ranks) return true;
  const unsigned ranks = unsigned(state.ranks);
  bool haveArrived = true;
  for (unsigned peer = threadIdx.x; peer < ranks; peer += blockDim.x) {
    shared.waited[peer] = has(turn.active, int(peer)) && int(peer) != state.rank
                              ? awaitHasAll(exchange, turn.serial, int(peer), deadline)
                              : Waited::kArrived;
    haveArrived = haveArrived && shared.waited[peer] == Waited::kArrived;
  }
  return haveAll(haveArrived, ranks, ranks, shared);
}

}  // namespace mooncake::kernels
