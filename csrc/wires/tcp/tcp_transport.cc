#include "wires/tcp/tcp_transport.h"

#include <algorithm>
#include <cerrno>
#include <poll.h>
#include <sys/epoll.h>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "wires/tcp/tcp_acceptor.h"
#include "wires/tcp/tcp_call.h"
#include "wires/tcp/tcp_channel.h"
#include "wires/tcp/tcp_redial.h"

namespace mooncake {
namespace {

constexpr uint16_t kEndpointVersion = 1;
// Most calls for one channel. If every one of them breaks, the cause is not an accident.
constexpr int kMostCalls = 8;

Result<SocketAddress> decodeEndpoint(ByteView endpoint) {
  ByteReader in(endpoint);
  const auto version = in.get<uint16_t>();
  SocketAddress address;
  address.port = in.get<uint16_t>();
  const ByteView raw = in.getBytes(address.host.raw.size());
  MOONCAKE_TRY(in.finish("tcp endpoint"));
  if (version != kEndpointVersion || address.port == 0 || (raw.size() != 4 && raw.size() != 16)) {
    return Error{ErrorCode::kProtocol, "a tcp endpoint does not decode"};
  }
  address.host.isV6 = raw.size() == 16;
  std::copy(raw.begin(), raw.end(), address.host.raw.begin());
  return address;
}

uint16_t lanesOf(const TransportContext& context) {
  return static_cast<uint16_t>(std::min<size_t>(1 + context.env.tcpConnections, kMaxLanes));
}

Result<std::unique_ptr<TcpCall>> callLane(const TransportContext& context, const EngineId& peer,
                                          const SocketAddress& address, uint16_t lane,
                                          uint64_t attempt, Deadline deadline) {
  return TcpCall::begin(context, address,
                        {.peer = peer,
                         .lane = lane,
                         .lanes = lanesOf(context),
                         .attempt = attempt,
                         .deadline = deadline,
                         .behindProof = {}});
}

// On the loop's thread.
void callDataLanes(const TransportContext& context, TcpRedial& redial, const EngineId& peer,
                   const SocketAddress& address, const std::shared_ptr<TcpChannel>& channel) {
  const uint64_t attempt = channel->attempt();
  const Deadline deadline = Deadline::after(context.env.failureTimeout);
  for (uint16_t lane = 1; lane < channel->lanes(); ++lane) {
    if (!channel->beginLane(lane)) continue;
    const auto done = [channel, lane](const Status& how) {
      channel->endLane(lane, how.ok());
      if (!how.ok())
        log(LogLevel::kInfo, "tcp", "data lane ", lane, " could not be made: ", how.error().message,
            "; gets go over the lanes that stand");
    };
    auto call = callLane(context, peer, address, lane, attempt, deadline);
    if (!call.ok()) {
      done(call.status());
      continue;
    }
    const auto add = [channel, lane](TcpCall& call) {
      channel->addLane(lane, call.take(), call.attempt());
      return Status();
    };
    redial.begin(std::move(*call), deadline, add, done);
  }
}

// Calls again if a call breaks.
class Dialing final : public Connecting {
 public:
  using Call = std::function<Result<std::unique_ptr<TcpCall>>()>;
  using Finish = std::function<std::shared_ptr<Channel>(TcpCall& call)>;

  static Result<std::unique_ptr<Connecting>> start(Call call, Finish finish) {
    auto first = call();
    if (!first.ok()) return first.error();
    return std::unique_ptr<Connecting>(
        new Dialing(std::move(call), std::move(finish), std::move(*first)));
  }

  Result<std::shared_ptr<Channel>> advance() override {
    for (;;) {
      const auto shaken = call_->shake();
      if (shaken.ok()) return *shaken ? finish_(*call_) : nullptr;
      if (!call_->broke() || calls_ == kMostCalls) return shaken.error();
      auto next = begin_();
      if (!next.ok()) return next.error();
      call_ = std::move(*next);
      ++calls_;
    }
  }
  void addSockets(std::vector<pollfd>& sockets) const override {
    sockets.push_back(call_->awaited());
  }

 private:
  Dialing(Call begin, Finish finish, std::unique_ptr<TcpCall> first)
      : begin_(std::move(begin)), finish_(std::move(finish)), call_(std::move(first)) {}

  const Call begin_;
  const Finish finish_;
  std::unique_ptr<TcpCall> call_;
  int calls_ = 1;
};

}  // namespace

Result<std::unique_ptr<Transport>> TcpTransport::create(const TransportContext& context) {
  const auto interfaces = listInterfaces();
  if (!interfaces.ok()) return interfaces.error();
  std::optional<HostAddress> towards;
  if (!context.env.hostIp && !context.env.routeHint.empty())
    towards = addressTowards(context.env.routeHint);
  const auto host = chooseHostAddress(*interfaces, context.env.hostIp, towards);
  if (!host.ok()) return host.error();
  auto listener = listenOn(*host);
  if (!listener.ok()) return listener.error();
  std::unique_ptr<TcpTransport> transport(new TcpTransport(context, listener->address));
  auto acceptor = TcpAcceptor::start(context, std::move(listener->socket));
  if (!acceptor.ok()) return acceptor.error();
  transport->acceptor_ = std::move(*acceptor);
  return std::unique_ptr<Transport>(std::move(transport));
}

Bytes TcpTransport::endpoint() const {
  ByteWriter out;
  out.put(kEndpointVersion).put(address_.port).putBytes(address_.host.bytes());
  return out.take();
}

Result<std::unique_ptr<Connecting>> TcpTransport::connect(const EngineId& peer, ByteView endpoint,
                                                          Deadline deadline) {
  const auto address = decodeEndpoint(endpoint);
  if (!address.ok()) return address.error();
  return Dialing::start(
      [this, peer, address = *address, deadline] {
        return callLane(context_, peer, address, 0, ++attempts_, deadline);
      },
      [this, peer, address = *address](TcpCall& call) {
        return TcpChannel::start(context_, call.take(),
                                 {.peer = peer,
                                  .lanes = lanesOf(context_),
                                  .attempt = call.attempt(),
                                  .makeLanes = laneMaker(peer, address)});
      });
}

// The channel may outlive the transport, and its gets ask for lanes on any thread.
std::function<void(const std::shared_ptr<TcpChannel>&)> TcpTransport::laneMaker(
    const EngineId& peer, const SocketAddress& address) const {
  return [&context = context_, weak = std::weak_ptr(redial_), peer,
          address](const std::shared_ptr<TcpChannel>& channel) {
    context.loop.post([&context, weak, peer, address, channel] {
      if (const auto redial = weak.lock()) callDataLanes(context, *redial, peer, address, channel);
    });
  };
}

void TcpTransport::reconnect(const EngineId& peer, const std::shared_ptr<Channel>& channel,
                             ByteView endpoint, Deadline deadline,
                             std::function<void(Status)> done) {
  const auto address = decodeEndpoint(endpoint);
  if (!address.ok()) return done(address.status());
  auto call = callLane(context_, peer, *address, 0, ++attempts_, deadline);
  if (!call.ok()) return done(call.status());
  redial_->begin(
      std::move(*call), deadline,
      [tcp = std::static_pointer_cast<TcpChannel>(channel)](TcpCall& call) {
        return tcp->reconnect(call.take(), call.attempt())
                   ? Status()
                   : Status(ErrorCode::kAborted, "the channel is closed");
      },
      std::move(done));
}

// The probes under way.
class TcpTransport::Probes : public std::enable_shared_from_this<Probes> {
 public:
  explicit Probes(EventLoop& loop) : loop_(loop) {}

  // On the loop's thread.
  void begin(const SocketAddress& address, Deadline deadline, std::function<void(Listener)> done) {
    const auto probe = std::make_shared<Probe>();
    probe->address = address;
    probe->done = std::move(done);
    {
      Lock lock(mutex_);
      if (isShutDown_) return;
      probes_.push_back(probe);
    }
    probe->timer = loop_.runAt(
        deadline, [self = shared_from_this(), probe] { self->end(probe, Listener::kNoAnswer); });
    ask(probe);
  }

  void shutdown() {
    std::vector<std::shared_ptr<Probe>> probes;
    {
      Lock lock(mutex_);
      isShutDown_ = true;
      probes.swap(probes_);
    }
    // Their timers find that they have ended.
    for (const auto& probe : probes) loop_.remove(probe->attempt.socket.get());
  }

 private:
  static constexpr auto kPause = std::chrono::milliseconds(20);

  struct Probe {
    SocketAddress address;
    ConnectAttempt attempt;
    std::function<void(Listener)> done;
    EventLoop::TimerId timer = 0;
  };

  void ask(const std::shared_ptr<Probe>& probe) {
    {
      Lock lock(mutex_);
      if (std::ranges::find(probes_, probe) == probes_.end()) return;
      probe->attempt = attemptConnect(probe->address);
      // Under the lock: a socket added after shutdown() would never be removed.
      if (probe->attempt.failure == 0) {
        (void)loop_.add(probe->attempt.socket.get(), EPOLLOUT,
                        [self = shared_from_this(), probe](uint32_t) { self->onOutcome(probe); });
        return;
      }
    }
    onOutcome(probe);
  }

  void onOutcome(const std::shared_ptr<Probe>& probe) {
    const auto outcome = outcomeOf(probe->attempt);
    if (!outcome) return;
    if (*outcome == 0) return end(probe, Listener::kAnswers);
    if (*outcome == ECONNREFUSED) return end(probe, Listener::kRefuses);
    // There is no way to the peer now, or this attempt was broken, too. That says nothing about the
    // process, so ask again.
    loop_.remove(probe->attempt.socket.get());
    loop_.runAt(Deadline::after(kPause), [self = shared_from_this(), probe] { self->ask(probe); });
  }

  void end(const std::shared_ptr<Probe>& probe, Listener answer) {
    {
      Lock lock(mutex_);
      if (isShutDown_ || std::erase(probes_, probe) == 0) return;
    }
    loop_.remove(probe->attempt.socket.get());
    loop_.cancel(probe->timer);
    probe->done(answer);
  }

  EventLoop& loop_;
  Mutex mutex_;
  bool isShutDown_ GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<Probe>> probes_ GUARDED_BY(mutex_);
};

TcpTransport::TcpTransport(const TransportContext& context, const SocketAddress& address)
    : context_(context),
      address_(address),
      probes_(std::make_shared<Probes>(context.loop)),
      redial_(std::make_shared<TcpRedial>(context.loop)) {}

void TcpTransport::probe(ByteView endpoint, Deadline deadline, std::function<void(Listener)> done) {
  const auto address = decodeEndpoint(endpoint);
  if (!address.ok()) return done(Listener::kUnknown);
  probes_->begin(*address, deadline, std::move(done));
}

void TcpTransport::shutdown() {
  probes_->shutdown();
  redial_->shutdown();
  if (acceptor_) acceptor_->stop();
}

}  // namespace mooncake
