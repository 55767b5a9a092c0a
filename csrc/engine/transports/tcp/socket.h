#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/fd.h"
#include "base/result.h"
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

// Small frames are not held back (TCP_NODELAY).
void tune(int socket);

// What a connected socket takes beyond what the network has room for is ahead of all that is sent
// later: a request for rows stood 13 ms behind an answer of 1.8 MB on a link of 1 Gbit/s, and two
// ranks that fetched from each other took turns. So it takes little of that, and the send queue,
// where requests overtake answers, keeps the rest. Its buffers stay the kernel's, which tunes them
// by itself, but for a peer at our own address: there is no distance to cover, and megabytes that
// wait in a socket have left the processor's cache when they are read (8 % of a broadcast of 4 MiB
// to three ranks).
void keepQueueShort(int socket);

// A connection whose other end does not answer for so long breaks, also when nothing is to be sent.
void breakWhenDead(int socket, std::chrono::milliseconds after);

// The socket is non-blocking and tuned; once it is known whether it is connected, it shows that to
// poll() as POLLOUT. `failure` is errno, 0 as long as none is known.
struct ConnectAttempt {
  Fd socket;
  int failure = 0;
};
ConnectAttempt attemptConnect(const SocketAddress& peer);
// Nothing: not decided yet; 0: connected; else errno.
std::optional<int> outcomeOf(const ConnectAttempt& attempt);
std::optional<int> outcomeOf(int socket);
Error unreachable(const SocketAddress& peer, int failure);  // kPeerLost, in words

// The same where a failure at once is the end of it.
Result<Fd> beginConnect(const SocketAddress& peer);

}  // namespace mooncake
