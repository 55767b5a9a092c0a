#include "wires/tcp/tcp_acceptor.h"

#include <utility>

#include "base/log.h"

namespace mooncake {

Result<std::shared_ptr<TcpAcceptor>> TcpAcceptor::start(const TransportContext& context,
                                                        Fd listener) {
  std::shared_ptr<TcpAcceptor> acceptor(new TcpAcceptor(context));
  const auto admit = [](int socket) {
    tune(socket);
    return true;
  };
  auto listening =
      HandshakeListener::start(context, std::move(listener), admit,
                               [weak = acceptor->weak_from_this()](Result<Handshaken> result) {
                                 if (const auto self = weak.lock())
                                   self->onHandshake(std::move(result));
                               });
  if (!listening.ok()) return listening.error();
  acceptor->listener_ = std::move(*listening);
  return acceptor;
}

void TcpAcceptor::stop() {
  std::map<EngineId, std::weak_ptr<TcpChannel>> accepted;
  {
    Lock lock(mutex_);
    if (std::exchange(stopped_, true)) return;
    accepted.swap(accepted_);
  }
  listener_->stop();  // waits for its handler, which takes our lock
  for (const auto& [peer, weak] : accepted) {
    if (const auto channel = weak.lock()) channel->close();
  }
}

void TcpAcceptor::onHandshake(Result<Handshaken> result) {
  if (result.ok()) return onLane(std::move(*result));
  // A refused peer belongs to another job or to another attempt at this one: that is a warning.
  // Strangers and scanners matter less. A probe closes its connection early, which matters least.
  const ErrorCode code = result.error().code;
  log(code == ErrorCode::kRefused                                       ? LogLevel::kWarning
      : code == ErrorCode::kPeerLost || code == ErrorCode::kInterrupted ? LogLevel::kDebug
                                                                        : LogLevel::kInfo,
      "tcp", "a connection was dropped: ", result.error().message);
}

// Only a peer that knows the key gets here. A lane that does not fit is dropped: it belongs to a
// channel that was reconnected or closed in the meantime.
void TcpAcceptor::onLane(Handshaken lane) {
  const EngineId peer = lane.peer;
  std::shared_ptr<TcpChannel> standing, channel;
  {
    Lock lock(mutex_);
    if (stopped_) return;
    if (const auto found = accepted_.find(peer); found != accepted_.end())
      standing = found->second.lock();
    if (lane.lane == 0 && standing && context_.peersReturn && standing->isClosed())
      standing.reset();
    if (lane.lane == 0 && !standing) {
      // Under the same lock, so that stop() closes every channel that is started.
      channel = TcpChannel::start(
          context_, std::move(lane.socket),
          {.peer = peer, .lanes = lane.lanes, .attempt = lane.attempt, .makeLanes = nullptr});
      std::erase_if(accepted_, [](const auto& entry) { return entry.second.expired(); });
      accepted_[peer] = channel;
    }
  }
  if (channel) return context_.onAccepted(peer, std::move(channel));
  if (!standing) return;
  if (lane.lane != 0) {
    standing->addLane(lane.lane, std::move(lane.socket), lane.attempt);
  } else if (standing->reconnect(std::move(lane.socket), lane.attempt)) {
    context_.onReconnected(peer);
  }
}

}  // namespace mooncake
