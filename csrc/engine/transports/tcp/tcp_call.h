#pragma once

#include <memory>
#include <poll.h>
#include <vector>

#include "engine/stream/handshake.h"
#include "engine/transports/tcp/socket.h"

namespace mooncake {

// The active side: all lanes of a channel at once. Belongs to one thread.
class TcpCall final : public Connecting {
 public:
  // `attempt` grows with every call of this engine: the peer takes no earlier one after it.
  static Result<std::unique_ptr<TcpCall>> begin(const TransportContext& context,
                                                const EngineId& peer, const SocketAddress& address,
                                                uint64_t attempt, Deadline deadline);

  // advance() in two parts: true once all lanes are shaken, then take them.
  Result<bool> shake();
  std::vector<Fd> take();
  uint64_t attempt() const { return attempt_; }
  // It failed because a connection was reset, or hung up before its handshake was over, and not
  // because nobody listens. That says nothing of the peer: another call may come through.
  bool broke() const { return broke_; }

  Result<std::shared_ptr<Channel>> advance() override;
  void addSockets(std::vector<pollfd>& sockets) const override;

 private:
  enum class State { kConnecting, kShaking, kShaken };
  struct Lane {
    HandshakeConnector handshake;
    State state = State::kConnecting;
  };

  TcpCall(const TransportContext& context, const EngineId& peer, const SocketAddress& address,
          uint64_t attempt, Deadline deadline)
      : context_(context), peer_(peer), address_(address), attempt_(attempt), deadline_(deadline) {}
  Status shake(Lane& lane);

  const TransportContext& context_;
  const EngineId peer_;
  const SocketAddress address_;
  const uint64_t attempt_;
  const Deadline deadline_;
  std::vector<Lane> lanes_;
  bool broke_ = false;
};

}  // namespace mooncake
