#pragma once

#include <atomic>
#include <memory>

#include "engine/contract/transport.h"
#include "wires/tcp/socket.h"

namespace mooncake {

class TcpAcceptor;
class TcpChannel;
class TcpRedial;

// Channels over TCP. Endpoint: version u16, port u16, address (u32 length, then 4 or 16 bytes).
class TcpTransport final : public Transport {
 public:
  // Listens on the address that chooseHostAddress() picks from env.hostIp and env.routeHint.
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context);
  ~TcpTransport() override { shutdown(); }

  const char* name() const override { return "tcp"; }
  Bytes endpoint() const override;
  Result<std::unique_ptr<Connecting>> connect(const EngineId& peer, ByteView endpoint,
                                              Deadline deadline) override;
  void probe(ByteView endpoint, Deadline deadline, std::function<void(Listener)> done) override;
  void reconnect(const EngineId& peer, const std::shared_ptr<Channel>& channel, ByteView endpoint,
                 Deadline deadline, std::function<void(Status)> done) override;
  void shutdown() override;

 private:
  class Probes;
  TcpTransport(const TransportContext& context, const SocketAddress& address);
  std::function<void(const std::shared_ptr<TcpChannel>&)> laneMaker(
      const EngineId& peer, const SocketAddress& address) const;

  const TransportContext& context_;
  const SocketAddress address_;
  std::shared_ptr<TcpAcceptor> acceptor_;
  std::atomic<uint64_t> attempts_{0};  // number of the last call
  std::shared_ptr<Probes> probes_;     // shared with the loop's timers
  std::shared_ptr<TcpRedial> redial_;
};

}  // namespace mooncake
