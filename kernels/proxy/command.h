#pragma once

#include <cstdint>

// Commands that kernels give to a thread of the host for peers that only the engine reaches
// (csrc/proxy). Plain data, which the host lays out before the first kernel.
namespace mooncake::kernels {

constexpr uint32_t kNoSignal = ~uint32_t(0);

// A copy into memory of a peer. The host trusts no field of it.
struct alignas(64) ProxyCommand {
  uint32_t sourceRegion;  // number of a region of this rank
  uint32_t targetRegion;  // number of a region of the peer
  uint64_t sourceOffset;
  uint64_t targetOffset;
  uint64_t bytes;
  uint32_t signal;  // number of the peer's word that counts this command, or kNoSignal
  uint32_t valid;   // the command's number plus one, written last: the other fields are there
};

// Why a peer's ring takes no more commands.
enum class ProxyEnd : uint32_t {
  kNone,
  kWrongCommand,  // a kernel has written a command that leaves a region
  kPeerLost,
  kTimeout,  // the peer has not taken a command in time
  kFailed,   // the peer or the wire has refused a command
  kClosed    // the host has closed the proxy
};

// Memory of the host that the device maps, or of the device that the host maps. The host writes it,
// kernels read it. Numbers of commands wrap.
struct alignas(64) ProxyCounts {
  uint32_t taken = 0;      // commands that have left their slots
  uint32_t completed = 0;  // commands that have arrived with their signals, and all before them
  uint32_t ended = 0;      // a ProxyEnd
};

// Memory of the device, which the host does not read.
struct alignas(64) ProxyTickets {
  uint32_t reserved = 0;   // commands that threads have reserved slots for
  uint32_t takenSeen = 0;  // ProxyCounts::taken, as a thread has last read it
};

// Time between two looks at memory of the host: each crosses the bus.
constexpr uint64_t kProxyLookNs = 2'000;

// An argument of kernels. Each peer has a ring, so that a silent one fills its own only.
struct ProxyView {
  ProxyCommand* commands;     // `slots` for each peer, one after the other
  const ProxyCounts* counts;  // one for each peer
  ProxyTickets* tickets;      // one for each peer
  const uint64_t* signals;    // `signalWords` that each peer counts up here, one after the other
  uint32_t peers;             // ranks, this one included
  uint32_t slots;             // a power of two
  uint32_t signalWords;
  uint64_t timeoutNs;                   // longest wait of a thread
  uint64_t countLookNs = kProxyLookNs;  // between two looks at `counts`
};

}  // namespace mooncake::kernels
