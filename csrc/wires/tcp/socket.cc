#include "wires/tcp/socket.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

namespace mooncake {
namespace {

struct Sockaddr {
  union {
    sockaddr generic;
    sockaddr_in v4;
    sockaddr_in6 v6;
  };
  socklen_t length;
};

Sockaddr toSockaddr(const SocketAddress& from) {
  Sockaddr to{};
  if (from.host.isV6) {
    to.v6.sin6_family = AF_INET6;
    to.v6.sin6_port = htons(from.port);
    std::memcpy(&to.v6.sin6_addr, from.host.raw.data(), 16);
    to.length = sizeof(to.v6);
  } else {
    to.v4.sin_family = AF_INET;
    to.v4.sin_port = htons(from.port);
    std::memcpy(&to.v4.sin_addr, from.host.raw.data(), 4);
    to.length = sizeof(to.v4);
  }
  return to;
}

Fd streamSocket(const HostAddress& host) {
  return Fd(
      ::socket(host.isV6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

}  // namespace

void tune(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void keepQueueShort(int socket) {
  const int unsent = 256 << 10;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof(unsent));
  Sockaddr here{}, there{};
  here.length = there.length = sizeof(here.v6);
  if (::getsockname(socket, &here.generic, &here.length) != 0) return;
  if (::getpeername(socket, &there.generic, &there.length) != 0) return;
  const bool sameHost =
      here.generic.sa_family == AF_INET6
          ? std::memcmp(&here.v6.sin6_addr, &there.v6.sin6_addr, sizeof(in6_addr)) == 0
          : here.v4.sin_addr.s_addr == there.v4.sin_addr.s_addr;
  if (!sameHost) return;
  const int bytes = 256 << 10;
  ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
}

void breakWhenDead(int socket, std::chrono::milliseconds after) {
  constexpr int kProbes = 4;
  const int on = 1, milliseconds = int(after.count());
  const int between = std::max(1, milliseconds / 1000 / (2 * kProbes));
  const int before = std::max(1, milliseconds / 1000 / 2);
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &before, sizeof(before));
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof(between));
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof(kProbes));
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

std::string SocketAddress::text() const {
  const std::string shown = host.isV6 ? "[" + host.text() + "]" : host.text();
  return shown + ":" + std::to_string(port);
}

Result<Listener> listenOn(const HostAddress& host) {
  Listener listener{streamSocket(host), {host, 0}};
  if (!listener.socket) return systemError("socket", errno);
  Sockaddr address = toSockaddr(listener.address);
  if (::bind(listener.socket.get(), &address.generic, address.length) != 0) {
    return systemError("bind(" + host.text() + ")", errno);
  }
  if (::listen(listener.socket.get(), SOMAXCONN) != 0)
    return systemError("listen(" + host.text() + ")", errno);
  if (::getsockname(listener.socket.get(), &address.generic, &address.length) != 0) {
    return systemError("getsockname", errno);
  }
  listener.address.port = ntohs(host.isV6 ? address.v6.sin6_port : address.v4.sin_port);
  return listener;
}

std::optional<int> outcomeOf(int socket) {
  pollfd writable{.fd = socket, .events = POLLOUT, .revents = 0};
  if (::poll(&writable, 1, 0) <= 0) return std::nullopt;
  int failure = 0;
  socklen_t length = sizeof(failure);
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &failure, &length);
  return failure;
}

ConnectAttempt attemptConnect(const SocketAddress& peer) {
  ConnectAttempt attempt{streamSocket(peer.host)};
  if (!attempt.socket) return {{}, errno};
  tune(attempt.socket.get());
  const Sockaddr address = toSockaddr(peer);
  if (::connect(attempt.socket.get(), &address.generic, address.length) != 0 &&
      errno != EINPROGRESS && errno != EINTR)
    attempt.failure = errno;
  return attempt;
}

std::optional<int> outcomeOf(const ConnectAttempt& attempt) {
  return attempt.failure != 0 ? attempt.failure : outcomeOf(attempt.socket.get());
}

Error unreachable(const SocketAddress& peer, int failure) {
  return {ErrorCode::kPeerLost, systemError("connect(" + peer.text() + ")", failure).message};
}

Result<Fd> beginConnect(const SocketAddress& peer) {
  ConnectAttempt attempt = attemptConnect(peer);
  if (!attempt.socket) return systemError("socket", attempt.failure);
  if (attempt.failure != 0) return unreachable(peer, attempt.failure);
  return std::move(attempt.socket);
}

}  // namespace mooncake
