#pragma once

#include <memory>
#include <poll.h>
#include <vector>

#include "wires/stream/handshake.h"
#include "wires/tcp/socket.h"

namespace mooncake {

// The active side of one lane. Belongs to one thread.
class TcpCall {
 public:
  // The handshake's options name the peer, the lane and the attempt. The attempt number grows with
  // every call of this engine for a lane 0: the peer refuses an earlier one after a later one.
  static Result<std::unique_ptr<TcpCall>> begin(const TransportContext& context,
                                                const SocketAddress& address,
                                                HandshakeConnector::Options options);

  // Goes as far as it can without waiting for the peer. True: call take().
  Result<bool> shake();
  Fd take() { return handshake_.take().socket; }
  // Returns the socket to wait for, after shake() returned false.
  pollfd awaited() const;
  uint64_t attempt() const { return attempt_; }
  // Returns whether it failed because the connection was reset or closed during the handshake, and
  // not for lack of a listener. That says nothing about the peer: another call may succeed.
  bool broke() const { return broke_; }

 private:
  TcpCall(const SocketAddress& address, HandshakeConnector handshake, uint64_t attempt,
          Deadline deadline)
      : address_(address),
        handshake_(std::move(handshake)),
        attempt_(attempt),
        deadline_(deadline) {}

  const SocketAddress address_;
  HandshakeConnector handshake_;
  const uint64_t attempt_;
  const Deadline deadline_;
  bool isConnected_ = false;
  bool broke_ = false;
};

}  // namespace mooncake
