#pragma once

#include <map>

#include "base/mutex.h"
#include "wires/stream/handshake_listener.h"
#include "wires/tcp/socket.h"
#include "wires/tcp/tcp_channel.h"

namespace mooncake {

// The passive side. A lane 0 begins a channel, or reconnects the peer's existing one. Another lane
// is added to that channel if both have the same attempt number.
class TcpAcceptor : public std::enable_shared_from_this<TcpAcceptor> {
 public:
  static Result<std::shared_ptr<TcpAcceptor>> start(const TransportContext& context, Fd listener);
  // Stops listening and closes the accepted channels.
  void stop();

 private:
  explicit TcpAcceptor(const TransportContext& context) : context_(context) {}
  void onHandshake(Result<Handshaken> result);
  void onLane(Handshaken lane) EXCLUDES(mutex_);

  const TransportContext& context_;
  std::shared_ptr<HandshakeListener> listener_;

  Mutex mutex_;
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::map<EngineId, std::weak_ptr<TcpChannel>> accepted_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
