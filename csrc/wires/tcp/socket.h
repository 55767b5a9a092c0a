#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/fd.h"
#include "base/result.h"
#include "wires/tcp/host_address.h"

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
// Listens on this address only, at a port that the kernel picks.
Result<Listener> listenOn(const HostAddress& host);

// Sets TCP_NODELAY, so that small frames are not held back.
void tune(int socket);

// Limits the bytes that wait unsent in the socket. Bytes in the socket go ahead of everything that
// is sent later. A request for rows waited 13 ms behind an answer of 1.8 MB at 1 Gbit/s; two ranks
// that fetched from each other took turns. The send queue keeps the rest; there, requests overtake
// answers. The kernel sizes the socket's buffers, except for a peer at our own address. That one
// gets a small buffer: megabytes that wait in a socket leave the processor's cache before they are
// read, which cost 8 % of a broadcast of 4 MiB to three ranks.
void keepQueueShort(int socket);

// Breaks a connection whose other end does not answer for this long, even if nothing is to be sent.
void breakWhenDead(int socket, std::chrono::milliseconds after);

// A non-blocking, tuned socket that is connecting. Once the outcome is known, poll() shows POLLOUT.
// `failure` is errno; 0: none is known yet.
struct ConnectAttempt {
  Fd socket;
  int failure = 0;
};
ConnectAttempt attemptConnect(const SocketAddress& peer);
// Nothing: not decided yet. 0: connected. Else errno.
std::optional<int> outcomeOf(const ConnectAttempt& attempt);
std::optional<int> outcomeOf(int socket);
Error unreachable(const SocketAddress& peer, int failure);  // kPeerLost, with errno in words

// The same as attemptConnect(), but a failure at once is returned as an error.
Result<Fd> beginConnect(const SocketAddress& peer);

}  // namespace mooncake
