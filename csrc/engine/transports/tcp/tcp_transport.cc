#include "engine/transports/tcp/tcp_transport.h"

#include <algorithm>

#include "engine/stream/handshake.h"
#include "engine/transports/tcp/tcp_acceptor.h"

namespace mooncake {
namespace {

constexpr uint16_t kEndpointVersion = 1;

Result<SocketAddress> decodeEndpoint(ByteView endpoint) {
  ByteReader in(endpoint);
  const auto version = in.get<uint16_t>();
  SocketAddress address;
  address.port = in.get<uint16_t>();
  const ByteView raw = in.getBytes(address.host.raw.size());
  MOONCAKE_TRY(in.finish("tcp endpoint"));
  if (version != kEndpointVersion || address.port == 0 || (raw.size() != 4 && raw.size() != 16)) {
    return Error{ErrorCode::kProtocol, "a tcp endpoint does not decode"};
  }
  address.host.isV6 = raw.size() == 16;
  std::copy(raw.begin(), raw.end(), address.host.raw.begin());
  return address;
}

uint64_t randomAttempt() {
  const Nonce nonce = Crypto::randomNonce();
  return ByteReader(nonce).get<uint64_t>();
}

}  // namespace

Result<std::unique_ptr<Transport>> TcpTransport::create(const TransportContext& context) {
  const auto interfaces = listInterfaces();
  if (!interfaces.ok()) return interfaces.error();
  std::optional<HostAddress> towards;
  if (!context.env.hostIp && !context.env.routeHint.empty())
    towards = addressTowards(context.env.routeHint);
  const auto host = chooseHostAddress(*interfaces, context.env.hostIp, towards);
  if (!host.ok()) return host.error();
  auto listener = listenOn(*host);
  if (!listener.ok()) return listener.error();
  std::unique_ptr<TcpTransport> transport(new TcpTransport(context, listener->address));
  auto acceptor = TcpAcceptor::start(context, std::move(listener->socket));
  if (!acceptor.ok()) return acceptor.error();
  transport->acceptor_ = std::move(*acceptor);
  return std::unique_ptr<Transport>(std::move(transport));
}

Bytes TcpTransport::endpoint() const {
  ByteWriter out;
  out.put(kEndpointVersion).put(address_.port).putBytes(address_.host.bytes());
  return out.take();
}

Result<std::shared_ptr<Channel>> TcpTransport::connect(const EngineId& peer, ByteView endpoint,
                                                       Deadline deadline) {
  const auto address = decodeEndpoint(endpoint);
  if (!address.ok()) return address.error();
  const auto count =
      static_cast<uint16_t>(std::min<size_t>(1 + context_.env.tcpConnections, kMaxLanes));
  const uint64_t attempt = randomAttempt();
  std::vector<Fd> lanes;
  for (uint16_t lane = 0; lane < count; ++lane) {
    auto socket = connectTo(*address, deadline);
    if (!socket.ok()) return socket.error();
    auto shaken =
        handshakeConnect(std::move(*socket), context_, peer, lane, count, deadline, attempt);
    if (!shaken.ok()) {
      return Error{shaken.error().code, address->text() + ": " + shaken.error().message};
    }
    lanes.push_back(std::move(shaken->socket));
  }
  return std::shared_ptr<Channel>(TcpChannel::start(context_, peer, std::move(lanes)));
}

void TcpTransport::shutdown() {
  if (acceptor_) acceptor_->stop();
}

}  // namespace mooncake
