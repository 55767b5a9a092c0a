#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "base/fd.h"
#include "engine/transports/tcp/host_address.h"

namespace mooncake {

struct SocketAddress {
  HostAddress host;
  uint16_t port = 0;
  std::string text() const;  // "10.0.0.1:4711", "[fd00::1]:4711"
};

struct Listener {
  Fd socket;  // non-blocking
  SocketAddress address;
};
// On this address only, at a port that the kernel picks.
Result<Listener> listenOn(const HostAddress& host);

// The next connection that waits, tuned like connectTo()'s; empty when none does. `spare` is a
// descriptor that may be given up for a moment: when no other is left, the connection is taken and
// dropped, because an unaccepted one would keep the event loop busy for ever.
Fd acceptFrom(int listener, Fd& spare);
Fd spareDescriptor();

// Bounded by the deadline. kPeerLost names the address. The socket is non-blocking and does not
// hold small frames back (TCP_NODELAY); buffer sizes stay the kernel's, which tunes them by itself.
Result<Fd> connectTo(const SocketAddress& peer, Deadline deadline);

}  // namespace mooncake
