#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "engine/stream/handshake_listener.h"
#include "engine/transports/tcp/socket.h"
#include "engine/transports/tcp/tcp_channel.h"

namespace mooncake {

// The passive side: brings the lanes of one channel together. What is incomplete goes after
// env.failureTimeout. A peer that connects again gets its channel renewed.
class TcpAcceptor : public std::enable_shared_from_this<TcpAcceptor> {
 public:
  static Result<std::shared_ptr<TcpAcceptor>> start(const TransportContext& context, Fd listener);
  // Stops listening, drops what is incomplete and closes the accepted channels.
  void stop();

 private:
  // Which channel a lane belongs to.
  struct Key {
    EngineId peer;
    uint64_t attempt;
    auto operator<=>(const Key&) const = default;
  };
  struct Incomplete {
    std::vector<Fd> lanes;
    Deadline deadline;
  };

  explicit TcpAcceptor(const TransportContext& context);
  void onHandshake(Result<Handshaken> result);
  std::vector<Fd> collect(Handshaken lane);
  void onTimer();
  void armTimer();

  const TransportContext& context_;
  std::shared_ptr<HandshakeListener> listener_;
  Fd timer_;  // when the first of incomplete_ is due

  std::mutex mutex_;  // guards what follows
  bool stopped_ = false;
  std::map<Key, Incomplete> incomplete_;
  std::map<EngineId, std::weak_ptr<TcpChannel>> accepted_;
};

}  // namespace mooncake
