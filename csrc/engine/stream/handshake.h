#pragma once

#include <functional>
#include <memory>

#include "base/event_loop.h"
#include "engine/transports/transport.h"

// Mutual challenge over any stream socket, the first bytes of every connection. Wire form in
// handshake.cc:
//   connector -> acceptor  HELLO      lane, lanes, attempt, connector id, acceptor id, nonce
//   acceptor -> connector  CHALLENGE  nonce, HMAC(key, "acceptor" | HELLO | nonce)
//   connector -> acceptor  PROOF      HMAC(key, "connector" | HELLO | CHALLENGE)
//   acceptor -> connector  WELCOME, or at any time REFUSED with a reason
// Neither side ever reads past the handshake, so what follows may be sent right behind PROOF.
namespace mooncake {

constexpr uint16_t kMaxLanes = 64;

struct Handshaken {
  Fd socket;  // non-blocking, everything of the handshake read, nothing after it
  EngineId peer;
  uint16_t lane;  // which of `lanes` connections of one channel this is
  uint16_t lanes;
  uint64_t
      attempt;  // the connector's random number for this channel: lanes of two attempts never mix
};

// Active side, on the calling thread, bounded by the deadline. kRefused: wrong key, wrong engine,
// wrong version. `behindProof` may send more as soon as the peer has proved itself.
Result<Handshaken> handshakeConnect(Fd socket, const TransportContext& context,
                                    const EngineId& peer, uint16_t lane, uint16_t lanes,
                                    Deadline deadline, uint64_t attempt = 0,
                                    const std::function<Status(int socket)>& behindProof = {});

// Passive side, on the event loop: a peer that is slow or silent costs nobody anything and is
// dropped at the deadline. `done` runs once on the loop's thread.
void handshakeAccept(Fd socket, const TransportContext& context, Deadline deadline,
                     std::function<void(Result<Handshaken>)> done);

}  // namespace mooncake
