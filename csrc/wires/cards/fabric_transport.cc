#include "wires/cards/fabric_transport.h"

#include <algorithm>
#include <map>

#include "base/log.h"
#include "base/mutex.h"

namespace mooncake {

// The channels by peer. Messages of a peer are for the channel that was made last and still lives.
class FabricTransport::Channels {
 public:
  void add(const EngineId& peer, const std::shared_ptr<FabricChannel>& channel, bool isOurs) {
    Lock lock(mutex_);
    for (auto& [other, ones] : channels_)
      std::erase_if(ones, [](const One& one) { return one.channel.expired(); });
    std::erase_if(channels_, [](const auto& entry) { return entry.second.empty(); });
    channels_[peer].push_back({channel, isOurs});
  }
  std::shared_ptr<FabricChannel> find(const EngineId& peer) const {
    Lock lock(mutex_);
    const auto found = channels_.find(peer);
    if (found == channels_.end()) return nullptr;
    for (auto one = found->second.rbegin(); one != found->second.rend(); ++one) {
      if (auto channel = one->channel.lock()) return channel;
    }
    return nullptr;
  }
  std::vector<std::shared_ptr<FabricChannel>> accepted() const {
    Lock lock(mutex_);
    std::vector<std::shared_ptr<FabricChannel>> found;
    for (const auto& [peer, ones] : channels_) {
      for (const One& one : ones) {
        if (auto channel = one.channel.lock(); channel && !one.isOurs)
          found.push_back(std::move(channel));
      }
    }
    return found;
  }

 private:
  struct One {
    std::weak_ptr<FabricChannel> channel;
    bool isOurs = false;
  };
  mutable Mutex mutex_;
  std::map<EngineId, std::vector<One>> channels_ GUARDED_BY(mutex_);
};

namespace {

class FabricConnecting final : public Connecting {
 public:
  FabricConnecting(std::unique_ptr<Connecting> below, std::shared_ptr<FabricChannel> channel)
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
  const std::shared_ptr<FabricChannel> channel_;
};

}  // namespace

FabricTransport::FabricTransport(const TransportContext& context, Options options)
    : options_(std::move(options)),
      context_(context),
      channels_(std::make_shared<Channels>()),
      inner_(context) {
  inner_.onAccepted = [this](EngineId peer, std::shared_ptr<Channel> below) {
    const auto channel = make(peer, false);
    channel->attach(std::move(below));
    context_.onAccepted(peer, channel);
  };
  inner_.onMessage = [this](EngineId peer, ByteView message) {
    if (message.empty()) return;
    const auto kind = static_cast<control::Kind>(message[0]);
    if (kind == control::Kind::kCarried) {
      if (options_.onCarried) options_.onCarried(peer, message.subspan(1));
    } else if (const auto channel = channels_->find(peer)) {
      channel->onControl(kind, message.subspan(1));
    }
  };
  inner_.onEnded = [this](EngineId peer, const Evidence& evidence) {
    if (const auto channel = channels_->find(peer)) channel->onEnded(evidence);
  };
  inner_.onReconnected = [this](EngineId peer) {
    const auto channel = channels_->find(peer);
    if (channel) channel->restart();
    context_.onReconnected(peer);
    if (channel) channel->resume();
  };
}

FabricTransport::~FabricTransport() { shutdown(); }

Result<std::unique_ptr<Transport>> FabricTransport::create(const TransportContext& context,
                                                           Create below, Options options) {
  std::unique_ptr<FabricTransport> transport(new FabricTransport(context, std::move(options)));
  auto nics = transport->options_.makeNics(
      [weak = std::weak_ptr(transport->channels_)](const EngineId& peer, ByteView bytes) {
        const auto channels = weak.lock();
        const auto channel = channels ? channels->find(peer) : nullptr;
        if (!channel) return Status(ErrorCode::kPeerLost, "there is no channel to that peer");
        return channel->carry(bytes);
      });
  if (!nics.ok()) return nics.error();
  auto rails = Rails::create(std::move(*nics), {.threads = transport->options_.threads,
                                                .name = transport->name(),
                                                .reopen = transport->options_.reopen});
  if (!rails.ok()) return rails.error();
  transport->rails_ = std::move(*rails);
  if (transport->options_.reopen) {
    transport->memories_ =
        std::make_shared<CardMemories>(context.regions, transport->rails_, transport->name());
    transport->rails_->onRenewal([weak = std::weak_ptr(transport->memories_)](size_t) {
      if (const auto memories = weak.lock()) memories->onRenewal();
    });
  }
  auto made = below(transport->inner_);
  if (!made.ok()) return made.error();
  transport->below_ = std::move(*made);
  return std::unique_ptr<Transport>(std::move(transport));
}

std::shared_ptr<FabricChannel> FabricTransport::make(const EngineId& peer, bool isOurs) {
  FabricChannel::Options options = options_.channel;
  if (options_.adapt) options = options_.adapt(std::move(options), isOurs);
  const auto channel =
      std::make_shared<FabricChannel>(context_, rails_, memories_, peer, std::move(options));
  channels_->add(peer, channel, isOurs);
  return channel;
}

Result<std::unique_ptr<Connecting>> FabricTransport::connect(const EngineId& peer,
                                                             ByteView endpoint, Deadline deadline) {
  auto below = below_->connect(peer, endpoint, deadline);
  if (!below.ok()) return below.error();
  // The channel is made before the connection stands, because its messages may come at once.
  return std::unique_ptr<Connecting>(new FabricConnecting(std::move(*below), make(peer, true)));
}

void FabricTransport::reconnect(const EngineId& peer, const std::shared_ptr<Channel>& channel,
                                ByteView endpoint, Deadline deadline,
                                std::function<void(Status)> done) {
  const auto fabric = std::static_pointer_cast<FabricChannel>(channel);
  if (fabric->isOver()) return done({ErrorCode::kAborted, "the channel is closed"});
  below_->reconnect(peer, fabric->below(), endpoint, deadline,
                    [fabric, deadline, done, isOver = isShutDown_](Status how) {
                      if (!how.ok()) return done(std::move(how));
                      fabric->restart(deadline,
                                      [weak = std::weak_ptr(fabric), done, isOver](Status path) {
                                        const bool stands = path.ok();
                                        if (!*isOver) done(std::move(path));
                                        const auto channel = weak.lock();
                                        if (channel && stands) channel->resume();
                                      });
                    });
}

CardCounters FabricTransport::cardCounters() const {
  if (!memories_) return {};
  return {.read = memories_->read.load(std::memory_order_relaxed),
          .written = memories_->written.load(std::memory_order_relaxed),
          .retried = memories_->retried.load(std::memory_order_relaxed)};
}

void FabricTransport::shutdown() {
  *isShutDown_ = true;
  for (const auto& channel : channels_->accepted()) channel->close();
  if (below_) below_->shutdown();
  if (rails_) rails_->stop();
  if (memories_) memories_->stop();
}

}  // namespace mooncake
