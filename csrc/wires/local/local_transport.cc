#include "wires/local/local_transport.h"

#include <algorithm>
#include <optional>
#include <poll.h>
#include <unistd.h>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"
#include "base/unix_socket.h"
#include "wires/stream/handshake_listener.h"

namespace mooncake {
namespace {

// Endpoint, wire form:  u32 process  string socket name (<= 64)
constexpr size_t kMaxName = 64;

// Most threads that copy. Two keep up where one does not: reading another process costs a third
// more than a memcpy.
constexpr size_t kMostCopiers = 2;

}  // namespace

class LocalTransport::Core : public std::enable_shared_from_this<Core> {
 public:
  Core(const TransportContext& context, std::unique_ptr<LocalWire> wire, uint64_t mirror,
       uint64_t exports, std::shared_ptr<FenceWords> fences)
      : context_(context),
        wire_(std::move(wire)),
        mirror_(mirror),
        exports_(exports),
        fences_(std::move(fences)) {}

  const LocalWire& wire() const { return *wire_; }

  Status listen(Fd socket) {
    auto listening = HandshakeListener::start(
        context_, std::move(socket),
        [self = this](int socket) { return self->wire_->leadsTo(peerProcess(socket)); },
        [weak = weak_from_this()](Result<Handshaken> shaken) {
          if (const auto self = weak.lock()) self->onHandshaken(std::move(shaken));
        });
    if (!listening.ok()) return listening.status();
    listener_ = std::move(*listening);
    return {};
  }

  Result<std::unique_ptr<Connecting>> connect(const EngineId& peer, const std::string& socketName,
                                              Deadline deadline);

  Result<std::shared_ptr<Channel>> open(Fd socket, pid_t process, const EngineId& peer,
                                        ArenaOffer offer, std::shared_ptr<FenceWords::Word> fence) {
    auto mapped = ArenaMapping::map(std::move(offer.memfd), offer.bytes);
    if (!mapped.ok()) return mapped.error();
    const std::shared_ptr<ArenaMapping> arena = std::move(*mapped);
    // The mapping sets kLeft, and not the channel's close(): operations check the word while they
    // read.
    arena->markAtEnd(offer.fence, FenceWords::kLeft);
    auto reader = wire_->reader(process, offer.greeting, *arena);
    std::shared_ptr<DeviceReader> devices;
    if (exports_ != 0 && offer.exports != 0) {
      devices = std::make_shared<DeviceReader>(
          DeviceReader::Peer{arena, offer.mirror, offer.exports, context_.env.mapsDeviceMemory},
          context_.loop);
    }
    Lock lock(mutex_);
    if (stopped_) return Error{ErrorCode::kAborted, "the transport is shut down"};
    std::shared_ptr<Channel> channel = LocalChannel::start(wire_->name(),
                                                           {.arena = arena,
                                                            .address = offer.address,
                                                            .mirror = offer.mirror,
                                                            .life = offer.life,
                                                            .fence = offer.fence,
                                                            .ours = std::move(fence),
                                                            .process = process,
                                                            .reader = std::move(reader),
                                                            .devices = std::move(devices),
                                                            .copyLater = copier(),
                                                            .sharesCopies = sharesCopies()},
                                                           std::move(socket), peer, context_);
    std::erase_if(channels_, [](const auto& weak) { return weak.expired(); });
    channels_.push_back(channel);
    return channel;
  }

  void shutdown() {
    std::vector<std::weak_ptr<Channel>> channels;
    {
      Lock lock(mutex_);
      if (std::exchange(stopped_, true)) return;
      channels.swap(channels_);
    }
    listener_->stop();
    for (const auto& weak : channels) {
      if (const auto channel = weak.lock()) channel->close();
    }
    std::vector<std::unique_ptr<EventLoop>> copiers;
    {
      Lock lock(mutex_);
      copiers.swap(copiers_);
    }
    for (auto& copier : copiers) copier->stop();
    wire_->shutdown();
  }

 private:
  // Without data loops, the engine's ranks copy on their own threads and have the cores for that.
  bool sharesCopies() const { return !context_.dataLoops.empty(); }
  // Returns a function that runs copies on the copier threads in turn. A thread starts with its
  // first copy.
  std::function<bool(std::function<void()>)> copier() {
    return [weak = weak_from_this()](std::function<void()> copy) {
      const auto self = weak.lock();
      return self && self->copyLater(std::move(copy));
    };
  }
  bool copyLater(std::function<void()> copy) {
    Lock lock(mutex_);
    if (stopped_) return false;
    const size_t most = sharesCopies() ? kMostCopiers : 1;
    const size_t turn = nextCopier_++ % most;
    if (turn >= copiers_.size()) {
      auto started = EventLoop::start("mooncake-copy");
      if (!started.ok()) {
        log(LogLevel::kWarning, wire_->name(), started.error().message);
        return false;
      }
      copiers_.push_back(std::move(*started));
    }
    copiers_[turn]->post(std::move(copy));
    return true;
  }

  ArenaOffer offer(FenceWords::Word& fence) const {
    return {.memfd = {},
            .mirror = mirror_,
            .exports = exports_,
            .life = context_.life,
            .fence = fence.offer(),
            .greeting = wire_->greeting()};
  }

  // ---- on the loop's thread

  void onHandshaken(Result<Handshaken> shaken) {
    if (!shaken.ok()) return refuse(shaken.error());
    const pid_t process = peerProcess(shaken->socket.get());
    auto fence = fences_->take(process);
    if (!fence.ok()) {
      (void)sendNoRoom(shaken->socket.get());  // the peer then uses another wire
      return refuse(fence.error());
    }
    const Status sent = sendOffer(shaken->socket.get(), context_.arena, offer(**fence));
    if (!sent.ok()) return refuse(sent.error());
    receiveOffer(std::move(shaken->socket), context_.loop,
                 Deadline::after(context_.env.failureTimeout),
                 [weak = weak_from_this(), process, peer = shaken->peer, fence = *fence](
                     Fd socket, Result<ArenaOffer> offer) {
                   const auto self = weak.lock();
                   if (self)
                     self->onOffer(process, peer, fence, std::move(socket), std::move(offer));
                 });
  }

  void onOffer(pid_t process, const EngineId& peer, std::shared_ptr<FenceWords::Word> fence,
               Fd socket, Result<ArenaOffer> offer) {
    if (!offer.ok()) return refuse(offer.error());
    auto channel = open(std::move(socket), process, peer, std::move(*offer), std::move(fence));
    if (!channel.ok()) return refuse(channel.error());
    context_.onAccepted(peer, std::move(*channel));
  }

  void refuse(const Error& why) {
    log(LogLevel::kWarning, wire_->name(), "a connection to us failed: ", why.message);
  }

  const TransportContext& context_;
  const std::unique_ptr<LocalWire> wire_;
  std::shared_ptr<HandshakeListener> listener_;
  const uint64_t mirror_;   // offset of the mirror in our arena
  const uint64_t exports_;  // of the exports; 0: memory of devices is not mapped
  const std::shared_ptr<FenceWords> fences_;
  Mutex mutex_;
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<Channel>> channels_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<EventLoop>> copiers_ GUARDED_BY(mutex_);
  size_t nextCopier_ GUARDED_BY(mutex_) = 0;
};

// The active side. It shakes hands, sends our offer right behind the proof, and then waits for the
// peer's offer, which follows the welcome.
class LocalTransport::Call final : public Connecting {
 public:
  Call(std::shared_ptr<Core> core, pid_t process, std::shared_ptr<FenceWords::Word> fence,
       Deadline deadline, HandshakeConnector handshake)
      : core_(std::move(core)),
        process_(process),
        fence_(std::move(fence)),
        deadline_(deadline),
        handshake_(std::move(handshake)) {}

  Result<std::shared_ptr<Channel>> advance() override {
    if (!shaken_) {
      const auto done = handshake_.advance();
      if (!done.ok()) return done.error();
      if (!*done) return std::shared_ptr<Channel>();
      shaken_ = handshake_.take();
    }
    const auto whole = offer_.advance(shaken_->socket.get());
    if (!whole.ok()) return whole.error();
    if (!*whole) {
      if (!deadline_.passed()) return std::shared_ptr<Channel>();
      return Error{ErrorCode::kTimeout, "the peer did not offer its arena in time"};
    }
    auto offer = offer_.take();
    if (!offer.ok()) {
      if (offer.error().code == ErrorCode::kUnsupported)
        log(LogLevel::kWarning, core_->wire().name(), offer.error().message,
            ": it is reached over another wire");
      return offer.error();
    }
    return core_->open(std::move(shaken_->socket), process_, shaken_->peer, std::move(*offer),
                       fence_);
  }

  void addSockets(std::vector<pollfd>& sockets) const override {
    const int socket = shaken_ ? shaken_->socket.get() : handshake_.socket();
    sockets.push_back({.fd = socket, .events = POLLIN, .revents = 0});
  }

 private:
  const std::shared_ptr<Core> core_;
  const pid_t process_;
  const std::shared_ptr<FenceWords::Word> fence_;
  const Deadline deadline_;
  HandshakeConnector handshake_;
  std::optional<Handshaken> shaken_;
  OfferReader offer_;
};

Result<std::unique_ptr<Connecting>> LocalTransport::Core::connect(const EngineId& peer,
                                                                  const std::string& socketName,
                                                                  Deadline deadline) {
  auto socket = connectAbstract(socketName, deadline);
  if (!socket.ok()) return socket.error();
  const pid_t process = peerProcess(socket->get());
  if (!wire_->leadsTo(process)) {
    return Error{ErrorCode::kUnsupported,
                 std::string(wire_->name()) + " does not lead to another process"};
  }
  const auto fence = fences_->take(process);
  if (!fence.ok()) {
    log(LogLevel::kWarning, wire_->name(), fence.error().message,
        ": a further one is reached over another wire");
    return Error{ErrorCode::kUnsupported, fence.error().message};
  }
  const auto ourOffer = [this, fence = *fence](int behind) {
    return sendOffer(behind, context_.arena, offer(*fence));
  };
  return std::unique_ptr<Connecting>(
      new Call(shared_from_this(), process, *fence, deadline,
               HandshakeConnector(std::move(*socket), context_,
                                  {.peer = peer, .deadline = deadline, .behindProof = ourOffer})));
}

Result<std::unique_ptr<Transport>> LocalTransport::create(const TransportContext& context,
                                                          std::unique_ptr<LocalWire> wire) {
  // 128 random bits: unique within the network namespace.
  std::string socketName = "mooncake-" + Crypto::randomHex(16);
  auto listener = listenAbstract(socketName);
  if (!listener.ok()) return listener.error();
  const auto mirror = context.regions.mirrorIn(context.arena);
  if (!mirror.ok()) return mirror.error();
  uint64_t exports = 0;
  if (context.env.mapsDeviceMemory || context.env.peerMessages != 0) {
    const auto exported = context.regions.exportIn(context.arena, context.env.mapsDeviceMemory);
    if (!exported.ok()) return exported.error();
    exports = *exported;
  }
  auto fences = FenceWords::create(context.arena);
  if (!fences.ok()) return fences.error();
  auto core =
      std::make_shared<Core>(context, std::move(wire), *mirror, exports, std::move(*fences));
  MOONCAKE_TRY(core->listen(std::move(*listener)));
  return std::unique_ptr<Transport>(new LocalTransport(std::move(socketName), std::move(core)));
}

LocalTransport::~LocalTransport() { shutdown(); }

const char* LocalTransport::name() const { return core_->wire().name(); }

Bytes LocalTransport::endpoint() const {
  return ByteWriter().put(static_cast<uint32_t>(::getpid())).putString(socketName_).take();
}

Result<std::unique_ptr<Connecting>> LocalTransport::connect(const EngineId& peer, ByteView endpoint,
                                                            Deadline deadline) {
  ByteReader in(endpoint);
  const auto process = in.get<uint32_t>();
  const std::string socketName = in.getString(kMaxName);
  MOONCAKE_TRY(in.finish("local endpoint"));
  // This number is only a hint that saves a connection; the kernel's answer for the socket decides.
  if (!core_->wire().leadsTo(static_cast<pid_t>(process))) {
    return Error{ErrorCode::kUnsupported,
                 std::string(name()) + " does not lead to another process"};
  }
  return core_->connect(peer, socketName, deadline);
}

void LocalTransport::shutdown() { core_->shutdown(); }

}  // namespace mooncake
