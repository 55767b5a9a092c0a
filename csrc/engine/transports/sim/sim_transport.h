#pragma once

#include <memory>

#include "engine/transports/transport.h"

namespace mooncake {

// A wire that is worse than any real one, made of another one that keeps order: for tests, never
// chosen unless asked for by name. Everything is late and out of order (SimChannel), as
// env.simSeed decides, and connections break.
class SimTransport final : public Transport {
 public:
  using Create = Result<std::unique_ptr<Transport>> (*)(const TransportContext& context);
  // A channel breaks once in `breakOdds` transfers, at the end that connected; 0: never.
  static constexpr uint32_t kBreakOdds = 500;
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context, Create below,
                                                   uint32_t breakOdds = kBreakOdds);
  ~SimTransport() override;

  const char* name() const override { return "sim"; }
  Bytes endpoint() const override { return below_->endpoint(); }
  Result<std::unique_ptr<Connecting>> connect(const EngineId& peer, ByteView endpoint,
                                              Deadline deadline) override;
  void probe(ByteView endpoint, Deadline deadline, std::function<void(Listener)> done) override {
    below_->probe(endpoint, deadline, std::move(done));
  }
  void reconnect(const EngineId& peer, const std::shared_ptr<Channel>& channel, ByteView endpoint,
                 Deadline deadline, std::function<void(Status)> done) override;
  void shutdown() override;

 private:
  class Channels;
  SimTransport(const TransportContext& context, uint32_t breakOdds);

  const std::unique_ptr<Channels> channels_;
  TransportContext inner_;  // of the wire below
  std::unique_ptr<Transport> below_;
};

}  // namespace mooncake
