#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "engine/contract/transport.h"
#include "wires/cards/fabric_channel.h"
#include "wires/cards/rails.h"

namespace mooncake {

// Network cards beside a wire that keeps order. Each channel is built on a channel of that wire,
// which provides handshake and key, messages, beats and the goodbye. It also tells whether the peer
// still listens, and makes broken connections again. The data goes over the cards, which all
// channels share.
class FabricTransport final : public Transport {
 public:
  using Create = Result<std::unique_ptr<Transport>> (*)(const TransportContext& context);
  using Nics = std::vector<std::unique_ptr<Nic>>;
  // Sends bytes to the peer's end of the wire below. kPeerLost: there is no channel to it.
  using Carry = std::function<Status(const EngineId& peer, ByteView bytes)>;

  struct Options {
    FabricChannel::Options channel;  // its name is also the transport's
    size_t threads = 1;              // number of polling threads; 0: one for each card
    // Makes the cards. Simulated cards call `carry`, on any thread, but with no lock that it takes.
    std::function<Result<Nics>(Carry carry)> makeNics;
    // Opens one of them anew, after it was closed.
    std::function<Result<std::unique_ptr<Nic>>(size_t index)> reopen = nullptr;
    // Takes the bytes that a peer's card has carried. On the loop's thread.
    std::function<void(const EngineId& peer, ByteView bytes)> onCarried = nullptr;
    // For tests: changes the options of each channel; `isOurs`: this side has called. Any thread.
    std::function<FabricChannel::Options(FabricChannel::Options, bool isOurs)> adapt = nullptr;
  };
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context, Create below,
                                                   Options options);
  ~FabricTransport() override;

  const char* name() const override { return options_.channel.name; }
  Bytes endpoint() const override { return below_->endpoint(); }
  Result<std::unique_ptr<Connecting>> connect(const EngineId& peer, ByteView endpoint,
                                              Deadline deadline) override;
  void probe(ByteView endpoint, Deadline deadline, std::function<void(Listener)> done) override {
    below_->probe(endpoint, deadline, std::move(done));
  }
  void reconnect(const EngineId& peer, const std::shared_ptr<Channel>& channel, ByteView endpoint,
                 Deadline deadline, std::function<void(Status)> done) override;
  CardCounters cardCounters() const override;
  size_t cardCount() const override { return rails_->count(); }
  void shutdown() override;

 private:
  class Channels;
  FabricTransport(const TransportContext& context, Options options);
  std::shared_ptr<FabricChannel> make(const EngineId& peer, bool isOurs);

  Options options_;
  const TransportContext& context_;
  const std::shared_ptr<Channels> channels_;
  TransportContext inner_;  // for the wire below
  std::shared_ptr<Rails> rails_;
  std::shared_ptr<CardMemories> memories_;
  std::unique_ptr<Transport> below_;
  const std::shared_ptr<std::atomic<bool>> isShutDown_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace mooncake
