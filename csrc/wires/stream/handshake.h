#pragma once

#include <functional>
#include <memory>

#include "base/deadline.h"
#include "base/event_loop.h"
#include "base/fd.h"
#include "engine/contract/transport.h"

// Mutual challenge over any stream socket: the first bytes of every connection. Wire form in
// handshake.cc:
//   connector -> acceptor  HELLO      lane, lanes, attempt, connector id, acceptor id, nonce
//   acceptor -> connector  CHALLENGE  nonce, HMAC(key, "acceptor" | HELLO | nonce)
//   connector -> acceptor  PROOF      HMAC(key, "connector" | HELLO | CHALLENGE)
//   acceptor -> connector  WELCOME, or at any time REFUSED with a reason
// Neither side reads past the handshake, so further bytes may be sent right behind PROOF.
namespace mooncake {

constexpr uint16_t kMaxLanes = 64;

struct Handshaken {
  Fd socket;  // non-blocking; the handshake is read, and nothing after it
  EngineId peer;
  uint16_t lane;  // number of this connection among the `lanes` of one channel
  uint16_t lanes;
  // The connector's number of this call. It grows, so that lanes of two calls never mix.
  uint64_t attempt;
};

// The active side, on a thread of the caller, over a connected socket.
class HandshakeConnector {
 public:
  struct Options {
    EngineId peer;
    uint16_t lane = 0;
    uint16_t lanes = 1;
    uint64_t attempt = 0;
    Deadline deadline;
    // Called as soon as the peer has proved itself; may send more.
    std::function<Status(int socket)> behindProof;
  };

  HandshakeConnector(Fd socket, const TransportContext& context, Options options);

  // Answers the messages that have arrived, and never waits. True: call take(). Errors are final.
  // kRefused: wrong key, wrong engine, or wrong version. kInterrupted: the peer is about to call
  // us, or does not know yet that the last channel has ended. kTimeout: the deadline has passed.
  Result<bool> advance();
  int socket() const { return socket_.get(); }
  Handshaken take();

 private:
  Status answer();
  Status takeChallenge();

  Fd socket_;
  const TransportContext& context_;
  const Options options_;
  Bytes hello_;    // empty before it is sent
  Bytes message_;  // being received
  Status behindProof_;
  bool proved_ = false;
};

// The passive side, on the event loop. A slow or silent peer blocks no other, and is dropped at the
// deadline. `done` runs once, on the loop's thread.
void handshakeAccept(Fd socket, const TransportContext& context, Deadline deadline,
                     std::function<void(Result<Handshaken>)> done);

}  // namespace mooncake
