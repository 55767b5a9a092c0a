#include "wires/tcp/tcp_call.h"

#include <cerrno>

namespace mooncake {

Result<std::unique_ptr<TcpCall>> TcpCall::begin(const TransportContext& context,
                                                const SocketAddress& address,
                                                HandshakeConnector::Options options) {
  auto socket = beginConnect(address);
  if (!socket.ok()) return socket.error();
  const uint64_t attempt = options.attempt;
  const Deadline deadline = options.deadline;
  return std::unique_ptr<TcpCall>(
      new TcpCall(address, HandshakeConnector(std::move(*socket), context, std::move(options)),
                  attempt, deadline));
}

Result<bool> TcpCall::shake() {
  if (!isConnected_) {
    const auto failure = outcomeOf(handshake_.socket());
    if (!failure) {
      if (!deadline_.passed()) return false;
      return Error{ErrorCode::kTimeout, "connect(" + address_.text() + "): no answer in time"};
    }
    if (*failure != 0) {
      broke_ = *failure == ECONNRESET;
      return unreachable(address_, *failure);
    }
    isConnected_ = true;
  }
  auto done = handshake_.advance();
  if (done.ok()) return done;
  broke_ = done.error().code == ErrorCode::kPeerLost;
  return Error{done.error().code, address_.text() + ": " + done.error().message};
}

pollfd TcpCall::awaited() const {
  const short events = isConnected_ ? POLLIN : POLLOUT;
  return {.fd = handshake_.socket(), .events = events, .revents = 0};
}

}  // namespace mooncake
