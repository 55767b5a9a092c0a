#pragma once

#include "kernels/group.cuh"
#include "kernels/proxy/proxy.cuh"
#include "kernels/warp.cuh"

// Data for ranks on other hosts, and their mails (kernels/remote.h).
namespace mooncake::kernels {

// The bank of an exchange in a remote rank's inbox.
MC_DEVICE unsigned char* inboxOf(const GroupState& state, int rank, uint64_t serial) {
  const Remote& remote = state.remote;
  return remote.inboxes[rank] + sizeof(Mails) + bankOf(serial, state.banks) * remote.inboxBankBytes;
}

// Offset of a mail in Mails.
MC_DEVICE size_t mailAt(MailKind kind, uint64_t serial, unsigned block) {
  return ((size_t(kind) * kMostBanks + serial % kMostBanks) * kMaxRemoteBlocks + block) *
         sizeof(Mail);
}

MC_DEVICE uint64_t checkOf(uint64_t signal, uint64_t count) {
  uint64_t x = signal * 0x9e3779b97f4a7c15u + count * 0xbf58476d1ce4e5b9u + 0x94d049bb133111ebu;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  return x ^ x >> 31;
}

// The signal of the mail that has come from a remote rank with all commands before it. 0: a mail of
// this exchange or a later one is on its way.
MC_DEVICE uint64_t mailedSignal(const Remote& remote, int peer, MailKind kind, uint64_t serial,
                                unsigned block) {
  const Mail& mail =
      *reinterpret_cast<const Mail*>(remote.inboxes[peer] + mailAt(kind, serial, block));
  const uint64_t signal = loadRelaxedSystem(&mail.signal);
  if (signal >> kCallBits < serial) return signal;
  const uint64_t count = loadRelaxedSystem(&mail.count);
  if (loadRelaxedSystem(&mail.check) != checkOf(signal, count)) return 0;
  const ProxyView& proxy = remote.proxy;
  const uint64_t* const arrived = proxy.signals + size_t(peer) * proxy.signalWords + block;
  return loadAcquireSystem(arrived) < count ? 0 : signal;
}

// Whether this rank's commands no longer reach a remote rank.
MC_DEVICE bool isCutOff(const Remote& remote, int peer) {
  return loadRelaxedDevice(&remote.isCutOff[peer]) != 0 ||
         loadAcquireSystem(&remote.proxy.counts[peer].ended) != 0;
}

// The commands of a block for a remote rank in an exchange. The same on all lanes of a warp.
struct Pushes {
  GroupState& state;
  int peer;
  unsigned block;
  uint64_t serial;
  uint64_t count;        // see Remote::pushed
  bool areWhole = true;  // no command was refused
};

// Each lane has a command, or none: 0 bytes. One warp, as in the functions below.
MC_DEVICE void pushCommands(Pushes& pushes, uint64_t source, uint64_t target, size_t bytes) {
  const Remote& remote = pushes.state.remote;
  const int peer = pushes.peer;
  const bool isOne = bytes != 0 && pushes.areWhole;
  bool isPushed = false;
  if (isOne) {
    const ProxyPut what{kOwnRegion, kInboxRegion, source, remote.inboxAt[peer] + target,
                        bytes,      pushes.block};
    isPushed = put(remote.proxy, uint32_t(peer), what).result == ProxyResult::kDone;
  }
  pushes.count += unsigned(__popc(__ballot_sync(kAllLanes, isPushed)));
  if (__any_sync(kAllLanes, isOne && !isPushed)) pushes.areWhole = false;
}

// Each lane pushes its `bytes` at `from` of this rank's bank to `to` of its bank in the remote
// rank's inbox. The block has written them before a barrier.
MC_DEVICE void push(Pushes& pushes, size_t from, size_t to, size_t bytes) {
  const GroupState& state = pushes.state;
  const size_t bank = bankOf(pushes.serial, state.banks);
  pushCommands(pushes, bank * state.bankBytes + from,
               sizeof(Mails) + bank * state.remote.inboxBankBytes + to, bytes);
}

// The last command. It tells how many came before it. A rank that lacks one gets no mail.
MC_DEVICE void pushMail(Pushes& pushes, MailKind kind, uint64_t signal) {
  Remote& remote = pushes.state.remote;
  const int peer = pushes.peer;
  const size_t at = mailAt(kind, pushes.serial, pushes.block);
  const uint64_t count = pushes.count + 1;
  if (lane() == 0 && pushes.areWhole) {
    Mail& mail = remote.outgoing[peer].of[size_t(kind)][pushes.serial % kMostBanks][pushes.block];
    mail = {signal, count, checkOf(signal, count), 0};
  }
  pushCommands(pushes, remote.outgoingAt + size_t(peer) * sizeof(Mails) + at, at,
               lane() == 0 ? sizeof(Mail) : 0);
  if (lane() != 0) return;
  remote.pushed[peer][pushes.block] = pushes.count;
  if (!pushes.areWhole) storeRelaxedDevice(&remote.isCutOff[peer], 1);
}

// Whether this rank has a mail to push: it was not pushed, and the rank is not cut off.
MC_DEVICE bool lacksMail(const Remote& remote, int peer, MailKind kind, uint64_t serial,
                         unsigned block, uint64_t signal) {
  bool lacks = false;
  if (lane() == 0) {
    const Mail& mail = remote.outgoing[peer].of[size_t(kind)][serial % kMostBanks][block];
    lacks = mail.signal != signal && loadRelaxedDevice(&remote.isCutOff[peer]) == 0;
  }
  return __shfl_sync(kAllLanes, int(lacks), 0) != 0;
}

MC_DEVICE uint64_t pushedTo(const Remote& remote, int peer, unsigned block) {
  return __shfl_sync(kAllLanes, lane() == 0 ? remote.pushed[peer][block] : 0, 0);
}

// Waits until `count` commands of the ring have completed: a broken connection may repeat the other
// commands, and their data would come late. Returns false if the rank gets no commands now: the
// host stops this kernel, if it may stop, or the rank is cut off. One thread.
MC_DEVICE bool awaitRing(GroupState& state, int peer, uint32_t count, bool mayStop) {
  ProxyView proxy = state.remote.proxy;
  const uint64_t deadline = now() + proxy.timeoutNs;
  proxy.timeoutNs = kHostLookNs;
  for (;;) {
    const ProxyResult result = awaitCompleted(proxy, uint32_t(peer), count);
    if (result == ProxyResult::kDone) return true;
    if (result == ProxyResult::kEnded || now() > deadline) break;
    if (mayStop && loadRelaxedSystem(&state.host->stop) != state.generation) return false;
  }
  storeRelaxedDevice(&state.remote.isCutOff[peer], 1);
  return false;
}

// All ranks begin an operation anew: waits for all commands to remote ranks. All threads of the
// last block.
MC_DEVICE void awaitRings(GroupState& state) {
  Remote& remote = state.remote;
  for (int peer = int(threadIdx.x); peer < state.ranks; peer += int(blockDim.x)) {
    if (!has(state.active & remote.ranks, peer)) continue;
    const uint32_t count = loadRelaxedDevice(&remote.proxy.tickets[peer].reserved);
    for (auto& used : remote.used) used[peer] = count;
    awaitRing(state, peer, count, true);
  }
  __syncthreads();
}

}  // namespace mooncake::kernels
