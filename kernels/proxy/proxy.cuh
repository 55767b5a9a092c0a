#pragma once

#include "kernels/device.h"
#include "kernels/proxy/command.h"

// The device's side of csrc/proxy. All threads of one device's kernels may call these functions. No
// call waits longer than ProxyView::timeoutNs.
namespace mooncake::kernels {

enum class ProxyResult : uint32_t {
  kDone,
  kLate,   // the deadline has passed. After put(): the ring is full, and nothing was reserved
  kEnded,  // ProxyCounts::ended says why. Commands that have not completed never do
};

struct ProxyPut {
  uint32_t sourceRegion;
  uint32_t targetRegion;
  uint64_t sourceOffset;
  uint64_t targetOffset;
  uint64_t bytes;
  uint32_t signal = kNoSignal;
};

struct ProxyTicket {
  ProxyResult result;
  uint32_t number;  // of the command, for awaitCommand()
};

// Calls `look` until it returns true, with pauses of `lookNs` by the device's clock. Returns false
// at the deadline.
template <typename Look>
MC_DEVICE bool lookUntil(uint64_t timeoutNs, uint64_t lookNs, const Look& look) {
  if (look()) return true;
  uint64_t time = now();
  const uint64_t deadline = time + timeoutNs;
  for (uint64_t next = time + lookNs; time < deadline;) {
    relax();
    time = now();
    if (time < next) continue;
    if (look()) return true;
    next = time + lookNs;
  }
  return false;
}

// Reserves a slot of the peer's ring. By a compare-and-swap and no addition: a thread that gives up
// leaves no slot behind that is never filled.
MC_DEVICE ProxyTicket reserve(const ProxyView& proxy, uint32_t peer) {
  ProxyTickets& tickets = proxy.tickets[peer];
  const ProxyCounts& counts = proxy.counts[peer];
  ProxyTicket ticket{ProxyResult::kDone, loadRelaxedDevice(&tickets.reserved)};
  const auto tryReserve = [&] {
    while (ticket.number - loadAcquireDevice(&tickets.takenSeen) < proxy.slots) {
      const uint32_t found = swapRelaxedDevice(&tickets.reserved, ticket.number, ticket.number + 1);
      if (found == ticket.number) return true;
      ticket.number = found;
    }
    return false;
  };
  if (tryReserve()) return ticket;
  const bool isOver = lookUntil(proxy.timeoutNs, proxy.countLookNs, [&] {
    if (loadAcquireSystem(&counts.ended)) {
      ticket.result = ProxyResult::kEnded;
      return true;
    }
    // Releases the loads that the host's word has acquired: the slot has been read.
    storeReleaseDevice(&tickets.takenSeen, loadAcquireSystem(&counts.taken));
    ticket.number = loadRelaxedDevice(&tickets.reserved);
    return tryReserve();
  });
  if (!isOver) ticket.result = ProxyResult::kLate;
  return ticket;
}

// Enqueues a command. Does not wait for the peer, only for a free slot. Bytes that this thread has
// written before, or that a barrier has made visible to it, are part of the source.
MC_DEVICE ProxyTicket put(const ProxyView& proxy, uint32_t peer, const ProxyPut& what) {
  const ProxyTicket ticket = reserve(proxy, peer);
  if (ticket.result != ProxyResult::kDone) return ticket;
  ProxyCommand& slot =
      proxy.commands[size_t(peer) * proxy.slots + (ticket.number & (proxy.slots - 1))];
  slot.sourceRegion = what.sourceRegion;
  slot.targetRegion = what.targetRegion;
  slot.sourceOffset = what.sourceOffset;
  slot.targetOffset = what.targetOffset;
  slot.bytes = what.bytes;
  slot.signal = what.signal;
  storeReleaseSystem(&slot.valid, ticket.number + 1);
  return ticket;
}

// Waits until `count` commands of the peer's ring have completed, from the first one on.
MC_DEVICE ProxyResult awaitCompleted(const ProxyView& proxy, uint32_t peer, uint32_t count) {
  const ProxyCounts& counts = proxy.counts[peer];
  ProxyResult result = ProxyResult::kLate;
  const auto hasCompleted = [&] {
    if (int32_t(loadAcquireSystem(&counts.completed) - count) < 0) return false;
    result = ProxyResult::kDone;
    return true;
  };
  lookUntil(proxy.timeoutNs, proxy.countLookNs, [&] {
    if (hasCompleted()) return true;
    if (!loadAcquireSystem(&counts.ended)) return false;
    // It may have completed between the two loads.
    if (!hasCompleted()) result = ProxyResult::kEnded;
    return true;
  });
  return result;
}

// Waits until the command, and all before it in the peer's ring, have arrived.
MC_DEVICE ProxyResult awaitCommand(const ProxyView& proxy, uint32_t peer, uint32_t number) {
  return awaitCompleted(proxy, peer, number + 1);
}

// The same for all commands of the ring that threads of this device have reserved so far.
MC_DEVICE ProxyResult flush(const ProxyView& proxy, uint32_t peer) {
  return awaitCompleted(proxy, peer, loadRelaxedDevice(&proxy.tickets[peer].reserved));
}

// Waits until `count` commands of the peer that name this word have arrived here, the first ones in
// the order of its ring.
MC_DEVICE ProxyResult awaitSignal(const ProxyView& proxy, uint32_t peer, uint32_t word,
                                  uint64_t count) {
  const uint64_t* const signal = proxy.signals + size_t(peer) * proxy.signalWords + word;
  ProxyResult result = ProxyResult::kLate;
  const auto hasArrived = [&] {
    if (loadAcquireSystem(signal) < count) return false;
    result = ProxyResult::kDone;
    return true;
  };
  lookUntil(proxy.timeoutNs, kProxyLookNs, [&] {
    if (hasArrived()) return true;
    if (!loadAcquireSystem(&proxy.counts[peer].ended)) return false;
    if (!hasArrived()) result = ProxyResult::kEnded;
    return true;
  });
  return result;
}

}  // namespace mooncake::kernels
