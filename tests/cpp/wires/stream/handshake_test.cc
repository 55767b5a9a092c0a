#include "wires/stream/handshake.h"

#include <future>
#include <poll.h>
#include <random>
#include <sys/socket.h>

#include "engine_side.h"

namespace mooncake::testing {
namespace {

std::pair<Fd, Fd> socketPair() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {Fd(ends[0]), Fd(ends[1])};
}

Deadline soon() { return Deadline::after(kPatience); }

HandshakeConnector::Options to(const EngineId& peer, Deadline deadline) {
  return {.peer = peer, .deadline = deadline, .behindProof = {}};
}

// Returns the passive side's result when the handshake is over.
std::future<Result<Handshaken>> accept(Fd socket, const EngineSide& side,
                                       Deadline deadline = soon()) {
  auto promise = std::make_shared<std::promise<Result<Handshaken>>>();
  auto future = promise->get_future();
  handshakeAccept(std::move(socket), side.context(), deadline,
                  [promise](Result<Handshaken> result) { promise->set_value(std::move(result)); });
  return future;
}

// Returns the first bytes that a real connector sends.
Bytes helloOf(const EngineSide& connector, const EngineId& peer) {
  auto [ours, theirs] = socketPair();
  ::shutdown(theirs.get(), SHUT_WR);
  EXPECT_FALSE(handshakeNow(std::move(ours), connector.context(), to(peer, soon())).ok());
  Bytes hello(1000);
  hello.resize(static_cast<size_t>(::recv(theirs.get(), hello.data(), hello.size(), 0)));
  return hello;
}

// Returns the bytes that arrive until the other side hangs up.
Bytes readToEnd(int socket) {
  Bytes all;
  std::byte chunk[256];
  for (ssize_t got; (got = ::recv(socket, chunk, sizeof(chunk), 0)) > 0;)
    all.insert(all.end(), chunk, chunk + got);
  return all;
}

TEST(HandshakeTest, BothSidesLearnWhoTheOtherIs) {
  EngineSide a, b;
  auto [one, other] = socketPair();
  auto accepted = accept(std::move(other), b);
  auto connected = handshakeNow(std::move(one), a.context(),
                                {.peer = b.id(),
                                 .lane = 2,
                                 .lanes = 5,
                                 .attempt = 99,
                                 .deadline = soon(),
                                 .behindProof = {}});
  ASSERT_TRUE(connected.ok()) << connected.error().message;
  const auto atB = accepted.get();
  ASSERT_TRUE(atB.ok()) << atB.error().message;
  EXPECT_EQ(connected->peer, b.id());
  EXPECT_EQ(atB->peer, a.id());
  EXPECT_EQ(atB->lane, 2);
  EXPECT_EQ(atB->lanes, 5);
  EXPECT_EQ(atB->attempt, 99u);
  EXPECT_EQ(::send(connected->socket.get(), "x", 1, 0), 1);
  EXPECT_TRUE(readToEnd(atB->socket.get()) == bytesOf("x"))
      << "nothing of the handshake is left over";
}

TEST(HandshakeTest, WrongKeyIsRefusedByTheConnector) {
  EngineSide a("one key"), b("another key");
  auto [one, other] = socketPair();
  auto accepted = accept(std::move(other), b);
  const auto connected = handshakeNow(std::move(one), a.context(), to(b.id(), soon()));
  ASSERT_FALSE(connected.ok());
  EXPECT_EQ(connected.error().code, ErrorCode::kRefused);
  EXPECT_FALSE(accepted.get().ok());
}

TEST(HandshakeTest, WrongProofIsRefusedByTheAcceptor) {
  EngineSide a, b;
  auto [one, other] = socketPair();
  auto accepted = accept(std::move(other), b);
  const Bytes hello = helloOf(a, b.id());
  ASSERT_EQ(::send(one.get(), hello.data(), hello.size(), 0), ssize_t(hello.size()));
  std::byte challenge[72];
  ASSERT_EQ(::recv(one.get(), challenge, sizeof(challenge), MSG_WAITALL),
            ssize_t(sizeof(challenge)));
  // Sends the acceptor's own code back, like an attacker that reflects it.
  ByteWriter proof;
  proof.putRaw(ByteView(hello).first(6)).put(uint16_t(3)).putRaw(ByteView(challenge).last(32));
  ASSERT_EQ(::send(one.get(), proof.bytes().data(), proof.bytes().size(), 0),
            ssize_t(proof.bytes().size()));
  const auto atB = accepted.get();
  ASSERT_FALSE(atB.ok());
  EXPECT_EQ(atB.error().code, ErrorCode::kRefused);
  EXPECT_EQ(readToEnd(one.get()).size(), 10u) << "REFUSED and nothing else";
}

TEST(HandshakeTest, WrongEngineIsRefused) {
  EngineSide a, b, c;
  auto [one, other] = socketPair();
  auto accepted = accept(std::move(other), b);
  const auto connected = handshakeNow(std::move(one), a.context(), to(c.id(), soon()));
  ASSERT_FALSE(connected.ok());
  EXPECT_EQ(connected.error().code, ErrorCode::kRefused);
  EXPECT_EQ(accepted.get().error().code, ErrorCode::kRefused);
}

TEST(HandshakeTest, WrongVersionIsRefused) {
  EngineSide a, b;
  auto [one, other] = socketPair();
  auto accepted = accept(std::move(other), b);
  Bytes hello = helloOf(a, b.id());
  hello[4] = std::byte{9};
  ASSERT_EQ(::send(one.get(), hello.data(), hello.size(), 0), ssize_t(hello.size()));
  EXPECT_EQ(accepted.get().error().code, ErrorCode::kRefused);
  EXPECT_EQ(readToEnd(one.get()).size(), 10u);
}

TEST(HandshakeTest, ASilentConnectorIsDroppedAtTheDeadline) {
  EngineSide b;
  auto [one, other] = socketPair();
  auto accepted = accept(std::move(other), b, Deadline::after(std::chrono::milliseconds(50)));
  ASSERT_EQ(accepted.wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(accepted.get().error().code, ErrorCode::kTimeout);
  EXPECT_TRUE(readToEnd(one.get()).empty());
}

TEST(HandshakeTest, ASilentAcceptorCostsTheConnectorItsDeadline) {
  EngineSide a, b;
  auto [one, other] = socketPair();
  const auto connected = handshakeNow(std::move(one), a.context(),
                                      to(b.id(), Deadline::after(std::chrono::milliseconds(50))));
  ASSERT_FALSE(connected.ok());
  EXPECT_EQ(connected.error().code, ErrorCode::kTimeout);
}

TEST(HandshakeTest, OneByteAtATime) {
  EngineSide a, b;
  auto [one, relayA] = socketPair();
  auto [other, relayB] = socketPair();
  auto accepted = accept(std::move(other), b);
  std::thread relay([&, left = relayA.get(), right = relayB.get()] {
    pollfd both[] = {{left, POLLIN, 0}, {right, POLLIN, 0}};
    while (::poll(both, 2, -1) > 0) {
      for (int i : {0, 1}) {
        std::byte one;
        if (!(both[i].revents & (POLLIN | POLLHUP))) continue;
        if (::recv(both[i].fd, &one, 1, 0) != 1) return;
        ::send(both[1 - i].fd, &one, 1, MSG_NOSIGNAL);
      }
    }
  });
  {
    const auto connected = handshakeNow(std::move(one), a.context(), to(b.id(), soon()));
    EXPECT_TRUE(connected.ok());
    EXPECT_TRUE(accepted.get().ok());
  }
  relay.join();
}

TEST(HandshakeTest, GarbageIsDropped) {
  EngineSide a, b;
  const Bytes hello = helloOf(a, b.id());
  std::mt19937_64 random(3);
  for (int i = 0; i < 2000; ++i) {
    auto [one, other] = socketPair();
    auto accepted = accept(std::move(other), b);
    Bytes bytes = hello;
    for (size_t at = i % 2 ? 0 : 6; at < bytes.size(); ++at) {
      if (random() % 4 == 0) bytes[at] = std::byte(random());
    }
    bytes.resize(random() % (bytes.size() + 200));
    ::send(one.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    one.reset();
    ASSERT_EQ(accepted.wait_for(kPatience), std::future_status::ready);
    EXPECT_FALSE(accepted.get().ok());
  }
}

}  // namespace
}  // namespace mooncake::testing
