#include "engine/local/local_transport.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "base/log.h"
#include "engine/local/unix_socket.h"

namespace mooncake {
namespace {

// Endpoint, wire form:  u32 process  string socket name (<= 64)
constexpr size_t kMaxName = 64;
// Whoever connects to us has this long for the handshake, and as long again for its offer.
constexpr std::chrono::seconds kAcceptBudget{10};

}  // namespace

class LocalTransport::Core : public std::enable_shared_from_this<Core> {
 public:
  Core(const TransportContext& context, std::unique_ptr<LocalWire> wire, Fd listener,
       uint64_t mirror)
      : context_(context),
        wire_(std::move(wire)),
        listener_(std::move(listener)),
        mirror_(mirror) {}

  const LocalWire& wire() const { return *wire_; }

  Status listen() {
    return context_.loop.add(listener_.get(), EPOLLIN, [weak = weak_from_this()](uint32_t) {
      if (const auto self = weak.lock()) self->acceptAll();
    });
  }

  Result<std::shared_ptr<Channel>> connect(const EngineId& peer, const std::string& socketName,
                                           Deadline deadline) {
    auto socket = connectAbstract(socketName, deadline);
    if (!socket.ok()) return socket.error();
    const pid_t process = peerProcess(socket->get());
    if (!wire_->leadsTo(process)) {
      return Error{ErrorCode::kUnsupported,
                   std::string(wire_->name()) + " does not lead to another process"};
    }
    auto shaken = handshakeConnect(std::move(*socket), context_, peer, 0, 1, deadline);
    if (!shaken.ok()) return shaken.error();
    MOONCAKE_TRY(sendOffer(shaken->socket.get(), context_.arena, mirror_, wire_->greeting()));
    auto offer = receiveOffer(shaken->socket.get(), deadline);
    if (!offer.ok()) return offer.error();
    return open(std::move(shaken->socket), process, peer, std::move(*offer));
  }

  void shutdown() {
    std::vector<std::weak_ptr<Channel>> channels;
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(stopped_, true)) return;
      channels.swap(channels_);
    }
    context_.loop.remove(listener_.get());
    listener_.reset();
    for (const auto& weak : channels) {
      if (const auto channel = weak.lock()) channel->close();
    }
    wire_->shutdown();
  }

 private:
  // ---- on the loop's thread

  void acceptAll() {
    for (;;) {
      Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        // Out of descriptors or memory: the waiting connection would wake us again and again.
        log(LogLevel::kError, wire_->name(), systemError("accept4", errno).message,
            ": no more connections are accepted");
        context_.loop.remove(listener_.get());
        return;
      }
      const pid_t process = peerProcess(socket.get());
      if (!wire_->leadsTo(process)) continue;
      handshakeAccept(std::move(socket), context_, Deadline::after(kAcceptBudget),
                      [weak = weak_from_this(), process](Result<Handshaken> shaken) {
                        const auto self = weak.lock();
                        if (self) self->onHandshaken(process, std::move(shaken));
                      });
    }
  }

  void onHandshaken(pid_t process, Result<Handshaken> shaken) {
    if (!shaken.ok()) return refuse(shaken.error());
    const Status sent = sendOffer(shaken->socket.get(), context_.arena, mirror_, wire_->greeting());
    if (!sent.ok()) return refuse(sent.error());
    receiveOffer(std::move(shaken->socket), context_.loop, Deadline::after(kAcceptBudget),
                 [weak = weak_from_this(), process, peer = shaken->peer](Fd socket,
                                                                         Result<ArenaOffer> offer) {
                   const auto self = weak.lock();
                   if (self) self->onOffer(process, peer, std::move(socket), std::move(offer));
                 });
  }

  void onOffer(pid_t process, const EngineId& peer, Fd socket, Result<ArenaOffer> offer) {
    if (!offer.ok()) return refuse(offer.error());
    auto channel = open(std::move(socket), process, peer, std::move(*offer));
    if (!channel.ok()) return refuse(channel.error());
    context_.onAccepted(peer, std::move(*channel));
  }

  void refuse(const Error& why) {
    log(LogLevel::kWarning, wire_->name(), "a connection to us failed: ", why.message);
  }

  // ---- any thread

  Result<std::shared_ptr<Channel>> open(Fd socket, pid_t process, const EngineId& peer,
                                        ArenaOffer offer) {
    auto arena = ArenaMapping::map(std::move(offer.memfd), offer.bytes);
    if (!arena.ok()) return arena.error();
    auto reader = wire_->reader(process, offer.greeting, **arena);
    std::lock_guard lock(mutex_);
    if (stopped_) return Error{ErrorCode::kAborted, "the transport is shut down"};
    std::shared_ptr<Channel> channel = LocalChannel::start(wire_->name(),
                                                           {.arena = std::move(*arena),
                                                            .address = offer.address,
                                                            .mirror = offer.mirror,
                                                            .reader = std::move(reader)},
                                                           std::move(socket), peer, context_);
    std::erase_if(channels_, [](const auto& weak) { return weak.expired(); });
    channels_.push_back(channel);
    return channel;
  }

  const TransportContext& context_;
  const std::unique_ptr<LocalWire> wire_;
  Fd listener_;
  const uint64_t mirror_;  // its offset in our arena
  std::mutex mutex_;       // guards stopped_ and channels_
  bool stopped_ = false;
  std::vector<std::weak_ptr<Channel>> channels_;
};

Result<std::unique_ptr<Transport>> LocalTransport::create(const TransportContext& context,
                                                          std::unique_ptr<LocalWire> wire) {
  // 128 random bits: unique among everything that shares the network namespace.
  std::string socketName = "mooncake-" + Crypto::randomHex(16);
  auto listener = listenAbstract(socketName);
  if (!listener.ok()) return listener.error();
  const auto mirror = context.regions.mirrorIn(context.arena);
  if (!mirror.ok()) return mirror.error();
  auto core = std::make_shared<Core>(context, std::move(wire), std::move(*listener), *mirror);
  MOONCAKE_TRY(core->listen());
  return std::unique_ptr<Transport>(new LocalTransport(std::move(socketName), std::move(core)));
}

LocalTransport::~LocalTransport() { shutdown(); }

const char* LocalTransport::name() const { return core_->wire().name(); }

Bytes LocalTransport::endpoint() const {
  return ByteWriter().put(static_cast<uint32_t>(::getpid())).putString(socketName_).take();
}

Result<std::shared_ptr<Channel>> LocalTransport::connect(const EngineId& peer, ByteView endpoint,
                                                         Deadline deadline) {
  ByteReader in(endpoint);
  const auto process = in.get<uint32_t>();
  const std::string socketName = in.getString(kMaxName);
  MOONCAKE_TRY(in.finish("local endpoint"));
  // The number is only a hint that saves a connection; what the kernel says about the socket
  // decides.
  if (!core_->wire().leadsTo(static_cast<pid_t>(process))) {
    return Error{ErrorCode::kUnsupported,
                 std::string(name()) + " does not lead to another process"};
  }
  return core_->connect(peer, socketName, deadline);
}

void LocalTransport::shutdown() { core_->shutdown(); }

}  // namespace mooncake
