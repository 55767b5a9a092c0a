#pragma once

#include <functional>
#include <memory>

#include "base/mutex.h"
#include "wires/stream/handshake.h"

namespace mooncake {

// The passive side of a stream transport: accepts connections, each of which must prove itself. All
// that a stranger can make us hold is bounded in number and in time (env.failureTimeout).
class HandshakeListener : public std::enable_shared_from_this<HandshakeListener> {
 public:
  // Handshakes at a time; further connections wait in the kernel's queue.
  static constexpr size_t kMaxHandshakes = 256;

  // Called before the handshake; false drops the connection. It may set options of the socket.
  using Admit = std::function<bool(int socket)>;
  using Done = std::function<void(Result<Handshaken>)>;

  // `listener` is non-blocking. Both callbacks run on the loop's thread. `done` may also run after
  // stop(), for a handshake that was under way.
  static Result<std::shared_ptr<HandshakeListener>> start(const TransportContext& context,
                                                          Fd listener, Admit admit, Done done);
  // When this returns, no connection is accepted any more. Do not hold a lock that a callback
  // takes.
  void stop();

 private:
  HandshakeListener(const TransportContext& context, Fd listener, Admit admit, Done done);
  void onConnection();
  bool mayAccept() EXCLUDES(mutex_);
  Fd accept();
  void pause(int failure);
  void setListening(bool listens) EXCLUDES(mutex_);
  void onHandshake(Result<Handshaken> result) EXCLUDES(mutex_);

  const TransportContext& context_;
  Fd listener_;
  // Used on the loop's thread only.
  Fd spare_;
  bool isPaused_ = false;
  bool hasWarned_ = false;
  const Admit admit_;
  const Done done_;
  Mutex mutex_;
  bool stopped_ GUARDED_BY(mutex_) = false;
  size_t handshakes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake
