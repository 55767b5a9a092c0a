#include "engine/transports/tcp/tcp_call.h"

#include <algorithm>
#include <cerrno>

#include "engine/transports/tcp/tcp_channel.h"

namespace mooncake {

Result<std::unique_ptr<TcpCall>> TcpCall::begin(const TransportContext& context,
                                                const EngineId& peer, const SocketAddress& address,
                                                uint64_t attempt, Deadline deadline) {
  std::unique_ptr<TcpCall> call(new TcpCall(context, peer, address, attempt, deadline));
  const auto lanes =
      static_cast<uint16_t>(std::min<size_t>(1 + context.env.tcpConnections, kMaxLanes));
  for (uint16_t lane = 0; lane < lanes; ++lane) {
    auto socket = beginConnect(address);
    if (!socket.ok()) return socket.error();
    call->lanes_.push_back({HandshakeConnector(std::move(*socket), context,
                                               {.peer = peer,
                                                .lane = lane,
                                                .lanes = lanes,
                                                .attempt = attempt,
                                                .deadline = deadline,
                                                .behindProof = {}})});
  }
  return call;
}

Result<bool> TcpCall::shake() {
  bool all = true;
  for (Lane& lane : lanes_) {
    MOONCAKE_TRY(shake(lane));
    all = all && lane.state == State::kShaken;
  }
  return all;
}

std::vector<Fd> TcpCall::take() {
  std::vector<Fd> sockets;
  for (Lane& lane : lanes_) sockets.push_back(lane.handshake.take().socket);
  return sockets;
}

Result<std::shared_ptr<Channel>> TcpCall::advance() {
  const auto all = shake();
  if (!all.ok()) return all.error();
  if (!*all) return std::shared_ptr<Channel>();
  return std::shared_ptr<Channel>(TcpChannel::start(context_, peer_, take(), attempt_));
}

void TcpCall::addSockets(std::vector<pollfd>& sockets) const {
  for (const Lane& lane : lanes_) {
    if (lane.state == State::kShaken) continue;
    const short events = lane.state == State::kConnecting ? POLLOUT : POLLIN;
    sockets.push_back({.fd = lane.handshake.socket(), .events = events, .revents = 0});
  }
}

Status TcpCall::shake(Lane& lane) {
  if (lane.state == State::kConnecting) {
    const auto failure = outcomeOf(lane.handshake.socket());
    if (!failure) {
      if (!deadline_.passed()) return {};
      return {ErrorCode::kTimeout, "connect(" + address_.text() + "): no answer in time"};
    }
    if (*failure != 0) {
      broke_ = *failure == ECONNRESET;
      return unreachable(address_, *failure);
    }
    lane.state = State::kShaking;
  }
  if (lane.state == State::kShaking) {
    const auto done = lane.handshake.advance();
    if (!done.ok()) {
      broke_ = done.error().code == ErrorCode::kPeerLost;
      return {done.error().code, address_.text() + ": " + done.error().message};
    }
    if (*done) lane.state = State::kShaken;
  }
  return {};
}

}  // namespace mooncake
