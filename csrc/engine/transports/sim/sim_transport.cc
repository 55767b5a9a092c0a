#include "engine/transports/sim/sim_transport.h"

#include <map>
#include <mutex>
#include <vector>

#include "base/log.h"
#include "engine/transports/sim/sim_channel.h"

namespace mooncake {

// Whose packets are whose.
class SimTransport::Channels {
 public:
  Channels(const TransportContext& context, uint32_t breakOdds)
      : context_(context), breakOdds_(breakOdds) {}

  // The n-th channel that was called, or accepted, has the same dice in every run.
  std::shared_ptr<SimChannel> make(const EngineId& peer, bool isOurs) {
    std::lock_guard lock(mutex_);
    const uint64_t number = isOurs ? 2 * called_++ : 2 * accepted_++ + 1;
    const auto channel = std::make_shared<SimChannel>(
        context_, peer,
        SimChannel::Options{.seed = context_.env.simSeed * 0x9e3779b97f4a7c15 + number,
                            .breakOdds = isOurs ? breakOdds_ : 0});
    std::erase_if(channels_, [](const auto& entry) { return entry.second.channel.expired(); });
    channels_[peer] = {channel, isOurs};
    return channel;
  }
  std::shared_ptr<SimChannel> find(const EngineId& peer) const {
    std::lock_guard lock(mutex_);
    const auto found = channels_.find(peer);
    return found == channels_.end() ? nullptr : found->second.channel.lock();
  }
  std::vector<std::shared_ptr<SimChannel>> accepted() const {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<SimChannel>> found;
    for (const auto& [peer, one] : channels_) {
      if (auto channel = one.channel.lock(); channel && !one.isOurs)
        found.push_back(std::move(channel));
    }
    return found;
  }

 private:
  struct One {
    std::weak_ptr<SimChannel> channel;
    bool isOurs = false;
  };
  const TransportContext& context_;
  const uint32_t breakOdds_;
  mutable std::mutex mutex_;  // guards what follows
  uint64_t called_ = 0, accepted_ = 0;
  std::map<EngineId, One> channels_;
};

namespace {

class SimConnecting final : public Connecting {
 public:
  SimConnecting(std::unique_ptr<Connecting> below, std::shared_ptr<SimChannel> channel)
      : below_(std::move(below)), channel_(std::move(channel)) {}

  Result<std::shared_ptr<Channel>> advance() override {
    auto below = below_->advance();
    if (!below.ok() || !*below) return below;
    channel_->attach(std::move(*below));
    return std::shared_ptr<Channel>(channel_);
  }
  void addSockets(std::vector<pollfd>& sockets) const override { below_->addSockets(sockets); }

 private:
  const std::unique_ptr<Connecting> below_;
  const std::shared_ptr<SimChannel> channel_;
};

}  // namespace

SimTransport::SimTransport(const TransportContext& context, uint32_t breakOdds)
    : channels_(std::make_unique<Channels>(context, breakOdds)), inner_(context) {
  inner_.onAccepted = [this, &context](EngineId peer, std::shared_ptr<Channel> below) {
    const auto channel = channels_->make(peer, false);
    channel->attach(std::move(below));
    context.onAccepted(peer, channel);
  };
  inner_.onMessage = [this](EngineId peer, ByteView packet) {
    if (const auto channel = channels_->find(peer)) channel->onPacket(packet);
  };
  inner_.onEnded = [this](EngineId peer, const Evidence& evidence) {
    if (const auto channel = channels_->find(peer)) channel->onEnded(evidence);
  };
  inner_.onReconnected = [this, &context](EngineId peer) {
    if (const auto channel = channels_->find(peer)) channel->restart();
    context.onReconnected(peer);
  };
}

SimTransport::~SimTransport() { shutdown(); }

Result<std::unique_ptr<Transport>> SimTransport::create(const TransportContext& context,
                                                        Create below, uint32_t breakOdds) {
  std::unique_ptr<SimTransport> transport(new SimTransport(context, breakOdds));
  auto made = below(transport->inner_);
  if (!made.ok()) return made.error();
  transport->below_ = std::move(*made);
  log(LogLevel::kInfo, "sim", "everything is late and out of order, by seed ", context.env.simSeed);
  return std::unique_ptr<Transport>(std::move(transport));
}

Result<std::unique_ptr<Connecting>> SimTransport::connect(const EngineId& peer, ByteView endpoint,
                                                          Deadline deadline) {
  auto below = below_->connect(peer, endpoint, deadline);
  if (!below.ok()) return below.error();
  // Before the connection stands: packets may come over it before we look.
  return std::unique_ptr<Connecting>(
      new SimConnecting(std::move(*below), channels_->make(peer, true)));
}

void SimTransport::reconnect(const EngineId& peer, const std::shared_ptr<Channel>& channel,
                             ByteView endpoint, Deadline deadline,
                             std::function<void(Status)> done) {
  const auto sim = std::static_pointer_cast<SimChannel>(channel);
  if (sim->isOver()) return done({ErrorCode::kAborted, "the channel is closed"});
  below_->reconnect(peer, sim->below(), endpoint, deadline, [sim, done](Status how) {
    if (how.ok()) sim->restart();
    done(std::move(how));
  });
}

void SimTransport::shutdown() {
  for (const auto& channel : channels_->accepted()) channel->close();
  if (below_) below_->shutdown();
}

}  // namespace mooncake
