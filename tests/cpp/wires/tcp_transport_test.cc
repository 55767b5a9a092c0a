#include "wires/tcp/tcp_transport.h"

#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "descriptor_limit.h"
#include "socket_breaker.h"
#include "transport_suite.h"
#include "wires/stream/handshake.h"
#include "wires/tcp/socket.h"

namespace mooncake::testing {
namespace {

struct Tcp {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return TcpTransport::create(context);
  }
  static EngineEnv env() { return onLoopback(); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Tcp, TransportSuite, Tcp);

struct TcpOneLane : Tcp {
  static EngineEnv env() {
    EngineEnv env = Tcp::env();
    env.tcpConnections = 0;
    return env;
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(TcpOneLane, TransportSuite, TcpOneLane);

SocketAddress addressOf(const Transport& transport) {
  const Bytes endpoint = transport.endpoint();
  ByteReader in(endpoint);
  in.get<uint16_t>();
  SocketAddress address;
  address.port = in.get<uint16_t>();
  const ByteView raw = in.getBytes(16);
  address.host.isV6 = raw.size() == 16;
  std::copy(raw.begin(), raw.end(), address.host.raw.begin());
  return address;
}

Deadline soon() { return Deadline::after(kPatience); }

class TcpTransportTest : public ::testing::Test {
 protected:
  void listen(std::chrono::milliseconds failureTimeout) {
    EngineEnv env = Tcp::env();
    env.failureTimeout = failureTimeout;
    side = std::make_unique<WireEnd>(env, Tcp::create);
  }
  Fd connectBare() {
    auto socket = beginConnect(addressOf(*side->transport));
    EXPECT_TRUE(socket.ok());
    EXPECT_TRUE(eventually([&] { return outcomeOf(socket->get()) == 0; }));
    return std::move(*socket);
  }
  // True if the other side has hung up, in order or not.
  static bool hungUp(const Fd& socket) {
    std::byte byte;
    const ssize_t got = ::recv(socket.get(), &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN);
  }

  std::unique_ptr<WireEnd> side;
};

TEST_F(TcpTransportTest, SilentAndBabblingConnectorsAreDropped) {
  listen(std::chrono::milliseconds(50));
  std::vector<Fd> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(connectBare());
  const Fd babbling = connectBare();
  const Bytes garbage = pattern(10000, 1);
  ::send(babbling.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
  EXPECT_TRUE(eventually([&] { return hungUp(babbling); }));
  for (const Fd& one : silent) EXPECT_TRUE(eventually([&] { return hungUp(one); }));
  EXPECT_EQ(side->acceptedCount(), 0u);
}

TEST_F(TcpTransportTest, ADataLaneNeedsTheChannelOfItsAttempt) {
  listen(std::chrono::seconds(20));
  EngineSide other;
  const auto lane = [&](uint16_t number, uint64_t attempt) {
    auto shaken = handshakeNow(connectBare(), other.context(),
                               {.peer = side->id(),
                                .lane = number,
                                .lanes = 3,
                                .attempt = attempt,
                                .deadline = soon(),
                                .behindProof = {}});
    EXPECT_TRUE(shaken.ok());
    return std::move(shaken->socket);
  };
  const Fd tooEarly = lane(1, 1);
  EXPECT_TRUE(eventually([&] { return hungUp(tooEarly); }));
  EXPECT_EQ(side->acceptedCount(), 0u);
  const Fd first = lane(0, 2);
  ASSERT_NE(side->acceptedFrom(other.id()), nullptr);
  const Fd second = lane(1, 2), ofAnEarlierAttempt = lane(2, 1), twice = lane(1, 2);
  EXPECT_TRUE(eventually([&] { return hungUp(ofAnEarlierAttempt) && hungUp(twice); }));
  EXPECT_FALSE(hungUp(first) || hungUp(second));
  EXPECT_EQ(side->endedCount(), 0u);
}

// Both ends of the connections are in this process.
size_t connections() { return test::SocketBreaker::connections().size() / 2; }

class TcpLanes : public ConnectedTest {
 protected:
  void SetUp() override { connect(a, b); }
  // Fetches from the memory of the channel's peer.
  void fetch(Channel& channel, const Part& part, size_t bytes) {
    Bytes target(bytes);
    Completion completion(&bell);
    ASSERT_TRUE(channel.get({part.remote(), 0, target, &completion}).ok());
    ASSERT_EQ(endOf(completion), ErrorCode::kOk);
    ASSERT_TRUE(part.holds(0, target));
  }
  static constexpr size_t kAll = 3;
  WireEnd a{onLoopback(), TcpTransport::create}, b{onLoopback(), TcpTransport::create};
};

TEST_F(TcpLanes, AreMadeAtTheFirstLargeGet) {
  const auto atB = b.part(1 << 20);
  expectPutArrives(*toB, atB, 1, 500000);
  for (int i = 0; i < 10; ++i) fetch(*toB, atB, 8000);
  EXPECT_EQ(connections(), 1u);
  fetch(*toB, atB, 100000);
  ASSERT_TRUE(eventually([&] { return connections() == kAll; }));
  fetch(*toB, atB, 1 << 20);
  EXPECT_EQ(connections(), kAll);
  EXPECT_EQ(a.endedCount() + b.endedCount(), 0u);
}

TEST_F(TcpLanes, AreAskedForByWhoWasCalled) {
  const auto atA = a.part(1 << 20);
  fetch(*toA, atA, 100000);
  ASSERT_TRUE(eventually([&] { return connections() == kAll; }));
  fetch(*toA, atA, 1 << 20);
  EXPECT_EQ(a.endedCount() + b.endedCount(), 0u);
}

TEST_F(TcpLanes, BeginFenced) {
  const auto atA = a.part(1 << 20), atB = b.part(1 << 20);
  toA->fence();
  Bytes target(1 << 20);
  Completion refused(&bell), theirs(&bell);
  ASSERT_TRUE(toB->get({atB.remote(), 0, target, &refused}).ok());
  EXPECT_EQ(endOf(refused), ErrorCode::kAborted);
  ASSERT_TRUE(eventually([&] { return connections() == kAll; }));
  // The get goes over a data lane that was opened after the fence.
  ASSERT_TRUE(eventually([&] {
    Completion completion(&bell);
    EXPECT_TRUE(toB->get({atB.remote(), 0, target, &completion}).ok());
    return endOf(completion) == ErrorCode::kAborted;
  }));
  EXPECT_EQ(toA->get({atA.remote(), 0, target, &theirs}).code(), ErrorCode::kAborted);
}

TEST_F(TcpLanes, AreMissedByNobodyWhereThereAreNoDescriptors) {
  SKIP_WHERE_CHECKS_NEED_DESCRIPTORS();
  const auto atA = a.part(3 << 20), atB = b.part(3 << 20);
  {
    const test::DescriptorLimit limit(0);
    for (int i = 0; i < 20; ++i) {
      fetch(*toB, atB, 3 << 20);
      fetch(*toA, atA, 3 << 20);
    }
  }
  EXPECT_EQ(a.endedCount() + b.endedCount(), 0u);
  ASSERT_TRUE(eventually([&] {
    fetch(*toB, atB, 1 << 20);
    return connections() == kAll;
  }));
  EXPECT_EQ(a.endedCount() + b.endedCount(), 0u);
}

TEST_F(TcpTransportTest, AnAcceptorWithoutDescriptorsGoesOnLater) {
  SKIP_WHERE_CHECKS_NEED_DESCRIPTORS();
  listen(std::chrono::seconds(20));
  {
    const test::DescriptorLimit limit(1);
    const Fd last = connectBare();
    ASSERT_TRUE(eventually([&] { return hungUp(last); }));
    // Within a short time: the acceptor closes it before it takes its spare descriptor back.
    Result<Fd> refused = Fd();
    ASSERT_TRUE(eventually([&] {
      refused = beginConnect(addressOf(*side->transport));
      return !refused.ok();
    }));
    EXPECT_NE(refused.error().message.find("this process may have "), std::string::npos)
        << refused.error().message;
    EXPECT_NE(refused.error().message.find("ulimit -n"), std::string::npos);
  }
  WireEnd other(Tcp::env(), Tcp::create);
  auto channel = connectNow(other, *side);
  ASSERT_TRUE(channel.ok()) << channel.error().message;
  EXPECT_NE(side->acceptedFrom(other.id()), nullptr);
  (*channel)->close();
}

TEST_F(TcpTransportTest, MoreConnectorsThanHandshakesAtATime) {
  listen(std::chrono::seconds(20));
  std::vector<Fd> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(connectBare());
  for (Fd& one : silent) one.reset();
  WireEnd other(Tcp::env(), Tcp::create);
  auto channel = connectNow(other, *side);
  ASSERT_TRUE(channel.ok()) << channel.error().message;
  EXPECT_NE(side->acceptedFrom(other.id()), nullptr);
  (*channel)->close();
}

// All ends of the connection in this process are broken after the connector has looked `looks`
// times, at any point of the acceptor.
TEST_F(TcpTransportTest, AHandshakeThatBreaksIsMadeAgain) {
  for (int looks = 0; looks <= 8; ++looks) {
    SCOPED_TRACE(looks);
    listen(std::chrono::seconds(20));
    WireEnd other(Tcp::env(), Tcp::create);
    auto connecting = other.transport->connect(side->id(), side->transport->endpoint(), soon());
    ASSERT_TRUE(connecting.ok());
    Result<std::shared_ptr<Channel>> channel = std::shared_ptr<Channel>();
    for (int look = 0; channel.ok() && !*channel; ++look) {
      if (look == looks) test::SocketBreaker::breakAll(test::SocketBreaker::How::kReset);
      std::vector<pollfd> sockets;
      (*connecting)->addSockets(sockets);
      ::poll(sockets.data(), sockets.size(), 10);
      channel = (*connecting)->advance();
    }
    ASSERT_TRUE(channel.ok()) << channel.error().message;
    const auto accepted = side->acceptedFrom(other.id());
    ASSERT_NE(accepted, nullptr);
    // Both ends have the same connections, those of the call that succeeded.
    ASSERT_TRUE((*channel)->send(bytesOf("there")).ok());
    EXPECT_EQ(side->messagesFrom(other.id(), 1), std::vector<Bytes>(1, bytesOf("there")));
    ASSERT_TRUE(accepted->send(bytesOf("and back")).ok());
    EXPECT_EQ(other.messagesFrom(side->id(), 1), std::vector<Bytes>(1, bytesOf("and back")));
    (*channel)->close();
  }
}

TEST_F(TcpTransportTest, AnAcceptorThatAlwaysHangsUpIsALostPeer) {
  EngineSide nobody;
  auto listener = listenOn(*HostAddress::parse("127.0.0.1"));
  ASSERT_TRUE(listener.ok());
  std::atomic<bool> stops{false};
  std::atomic<int> calls{0};
  std::thread acceptor([&] {
    for (pollfd ready{.fd = listener->socket.get(), .events = POLLIN, .revents = 0}; !stops;) {
      if (::poll(&ready, 1, 10) <= 0) continue;
      if (Fd(::accept(listener->socket.get(), nullptr, nullptr))) ++calls;
    }
  });
  WireEnd other(Tcp::env(), Tcp::create);
  const Bytes endpoint = ByteWriter()
                             .put(uint16_t(1))
                             .put(listener->address.port)
                             .putBytes(listener->address.host.bytes())
                             .take();
  const auto result = connectNow(*other.transport, nobody.id(), endpoint, soon());
  stops = true;
  acceptor.join();
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code, ErrorCode::kPeerLost);
  EXPECT_GE(calls, 8);
}

TEST_F(TcpTransportTest, NobodyThereIsALostPeer) {
  listen(std::chrono::seconds(3));
  const Bytes endpoint = side->transport->endpoint();
  const std::string address = addressOf(*side->transport).text();
  side->transport->shutdown();
  WireEnd other(Tcp::env(), Tcp::create);
  const auto result = connectNow(*other.transport, side->id(), endpoint, soon());
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code, ErrorCode::kPeerLost);
  EXPECT_NE(result.error().message.find(address), std::string::npos) << result.error().message;
}

// Gives loopback its address, or takes it away. Without it connect() fails at once.
void setLoopback(bool hasAddress) {
  const Fd socket{::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(hasAddress ? INADDR_LOOPBACK : INADDR_ANY);
  std::memcpy(&request.ifr_addr, &address, sizeof(address));
  ASSERT_EQ(::ioctl(socket.get(), SIOCSIFADDR, &request), 0) << std::strerror(errno);
  request.ifr_flags = IFF_UP;
  ASSERT_EQ(::ioctl(socket.get(), SIOCSIFFLAGS, &request), 0) << std::strerror(errno);
}

// The thread, and the threads that it starts, have a network namespace of their own.
TEST(TcpProbe, IsMadeAgainWhenThereIsNoWay) {
  bool mayUnshare = true;
  std::thread([&] {
    mayUnshare = ::unshare(CLONE_NEWNET) == 0;
    if (!mayUnshare) return;
    ASSERT_NO_FATAL_FAILURE(setLoopback(true));
    WireEnd listener(Tcp::env(), Tcp::create);
    WireEnd asks(Tcp::env(), Tcp::create);
    ASSERT_NO_FATAL_FAILURE(setLoopback(false));
    std::promise<void> hasAsked;
    std::promise<Transport::Listener> answer;
    asks.loop().post([&] {
      asks.transport->probe(listener.transport->endpoint(), soon(),
                            [&](Transport::Listener how) { answer.set_value(how); });
      hasAsked.set_value();
    });
    hasAsked.get_future().wait();  // in vain
    ASSERT_NO_FATAL_FAILURE(setLoopback(true));
    EXPECT_EQ(answer.get_future().get(), Transport::Listener::kAnswers);
  }).join();
  if (!mayUnshare) GTEST_SKIP() << "needs a network namespace";
}

// The peer is a process of its own that is killed while a get is under way.
TEST(TcpKillTest, AKilledPeerEndsTheChannelAndItsGets) {
  constexpr size_t kBytes = size_t(256) << 20;
  int toParent[2];
  ASSERT_EQ(::pipe(toParent), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    WireEnd side(Tcp::env(), Tcp::create);
    auto part = side.part(kBytes);
    ByteWriter out;
    const Bytes endpoint = side.transport->endpoint();
    out.putRaw(side.id()).put(part.remote().key).putBytes(endpoint);
    if (::write(toParent[1], out.bytes().data(), out.bytes().size()) < 0) ::_exit(1);
    for (;;) ::pause();
  }
  Bytes hello(1000);
  const ssize_t got = ::read(toParent[0], hello.data(), hello.size());
  ASSERT_GT(got, 0);
  ByteReader in(ByteView(hello).first(got));
  EngineId peer;
  const ByteView id = in.getRaw(peer.size());
  std::copy(id.begin(), id.end(), peer.begin());
  const RemoteRegion region{0, kBytes, in.get<uint64_t>()};
  const ByteView endpoint = in.getBytes(100);

  Doorbell bell;
  Bytes target(kBytes);
  WireEnd side(Tcp::env(), Tcp::create);
  auto channel = connectNow(*side.transport, peer, endpoint, soon());
  ASSERT_TRUE(channel.ok()) << channel.error().message;
  Completion completion(&bell);
  ASSERT_TRUE((*channel)->get({region, 0, target, &completion}).ok());
  ::kill(child, SIGKILL);
  EXPECT_EQ(side.endOf(peer).code(), ErrorCode::kPeerLost);
  EXPECT_EQ(endOf(completion), ErrorCode::kPeerLost);
  EXPECT_FALSE((*channel)->put({region, 128, {}, {64, stampOf(1)}}).ok());
  EXPECT_EQ(side.endedCount(), 1u);
  (*channel)->close();
  ::waitpid(child, nullptr, 0);
  ::close(toParent[0]);
  ::close(toParent[1]);
}

}  // namespace
}  // namespace mooncake::testing
