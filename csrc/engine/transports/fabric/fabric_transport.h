#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "engine/contract/transport.h"
#include "engine/transports/fabric/fabric_channel.h"
#include "engine/transports/fabric/rails.h"

namespace mooncake {

// Network cards beside a wire that keeps order. Beneath each channel stands one of that wire: it
// brings handshake and key, messages and beats, the goodbye, the question whether somebody listens
// and the making again of what broke. The bytes go over the cards, which all channels share.
class FabricTransport final : public Transport {
 public:
  using Create = Result<std::unique_ptr<Transport>> (*)(const TransportContext& context);
  using Nics = std::vector<std::unique_ptr<Nic>>;
  // To the peer's end of the wire beneath; kPeerLost: there is none.
  using Carry = std::function<Status(const EngineId& peer, ByteView bytes)>;

  struct Options {
    FabricChannel::Options channel;  // its name is the transport's
    size_t threads = 1;              // that poll; 0: one for each card
    // The cards. Those that are simulated use `carry`, on any thread and with no lock of ours that
    // it takes.
    std::function<Result<Nics>(Carry carry)> makeNics;
    // One of them anew, when it was closed.
    std::function<Result<std::unique_ptr<Nic>>(size_t index)> reopen = nullptr;
    // What a peer's card has carried. On the loop's thread.
    std::function<void(const EngineId& peer, ByteView bytes)> onCarried = nullptr;
    // Of each channel; `isOurs`: we called. For tests. Any thread.
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
  void shutdown() override;

 private:
  class Channels;
  FabricTransport(const TransportContext& context, Options options);
  std::shared_ptr<FabricChannel> make(const EngineId& peer, bool isOurs);

  Options options_;
  const TransportContext& context_;
  const std::shared_ptr<Channels> channels_;
  TransportContext inner_;  // of the wire below
  std::shared_ptr<Rails> rails_;
  std::shared_ptr<CardMemories> memories_;
  std::unique_ptr<Transport> below_;
  const std::shared_ptr<std::atomic<bool>> isShutDown_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace mooncake
