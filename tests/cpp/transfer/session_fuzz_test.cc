#include <arpa/inet.h>
#include <cstdlib>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <random>
#include <sys/socket.h>

#include "transfer/session_server.h"
#include "transfer/session_socket.h"
#include "wire_end.h"
#include "wires/stream/handshake.h"

// Sends random bytes to the session port and its decoders. Half of the clients hold the key.
// MOONCAKE_FUZZ_FRAMES=1000000 is the long run.
namespace mooncake::transfer {
namespace {

using mooncake::testing::eventually;
using mooncake::testing::handshakeNow;
using mooncake::testing::kPatience;
using mooncake::testing::onLoopback;
using std::chrono_literals::operator""s;

size_t inputsToTry() {
  const char* asked = std::getenv("MOONCAKE_FUZZ_FRAMES");
  return asked ? std::strtoull(asked, nullptr, 10) : 20000;
}

SegmentDescription someSegment(size_t buffers) {
  SegmentDescription segment{.name = "127.0.0.1:15000", .protocol = "tcp", .endpoint = Bytes(40)};
  for (size_t i = 0; i < buffers; ++i)
    segment.buffers.push_back({{4096 * i, 4096, i + 1}, 3, "cpu:0"});
  return segment;
}

// Returns valid bytes with a few of them changed, cut off, or added.
Bytes spoiled(Bytes bytes, std::minstd_rand& random) {
  for (size_t i = random() % 4; i-- > 0 && !bytes.empty();)
    bytes[random() % bytes.size()] = std::byte(random());
  if (random() % 3 == 0) bytes.resize(random() % (bytes.size() + 20));
  return bytes;
}

TEST(SessionFuzz, WhatDecodesIsWhatWasEncoded) {
  std::minstd_rand random(1);
  for (size_t i = 0; i < inputsToTry(); ++i) {
    const Bytes answer = spoiled(someSegment(random() % 5).encode(), random);
    const auto segment = SegmentDescription::decode(answer);
    if (segment.ok()) {
      EXPECT_EQ(segment->encode(), answer);
    }
    const Bytes question = spoiled(Question{.kind = Question::Kind::kProbe}.encode(), random);
    const auto asked = Question::decode(question);
    if (asked.ok()) {
      EXPECT_EQ(asked->encode(), question);
    }
  }
}

// The text of a session id must parse to the same id.
TEST(SessionFuzz, BracketsStandAroundAnAddressAndNowhereElse) {
  for (const char* text : {"a[fe80::1]:1", "[a[b]:1", "a]:1", "--[fe80::1%e:h0]:1500"})
    EXPECT_FALSE(SessionId::parse(text).ok()) << text;
  for (const char* text : {"[fe80::1%eth0]:15000", "10.0.0.1:1", "node-a"}) {
    const auto id = SessionId::parse(text);
    ASSERT_TRUE(id.ok()) << text;
    EXPECT_EQ(id->text(), text);
  }
}

class SessionPort : public ::testing::Test {
 protected:
  void SetUp() override {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    socklen_t bytes = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    ASSERT_EQ(::bind(listener.get(), generic, bytes), 0);
    ASSERT_EQ(::listen(listener.get(), 64), 0);
    ASSERT_EQ(::getsockname(listener.get(), generic, &bytes), 0);
    where_ = {"127.0.0.1", ntohs(address.sin_port)};
    // Answers as an engine's session does, under the id that all sessions have.
    listens_.reset(new TransportContext{.id = kSessionListener,
                                        .env = onLoopback(),
                                        .jobKey = side_.context().jobKey,
                                        .crypto = side_.context().crypto,
                                        .regions = side_.regions(),
                                        .arena = side_.context().arena,
                                        .life = 0,
                                        .loop = side_.loop()});
    auto server = SessionServer::start(*listens_, std::move(listener), [this] { return all_; });
    ASSERT_TRUE(server.ok()) << server.error().message;
    server_ = std::move(*server);
  }
  void TearDown() override {
    if (server_) server_->stop();
  }
  void expectAnswers() {
    const auto answer = askSession(side_.context(), where_.text(), {}, Deadline::after(20s));
    ASSERT_TRUE(answer.ok()) << answer.error().message;
    EXPECT_EQ(answer->encode(), *all_);
  }
  // Sends questions, or random bytes, until the port hangs up.
  size_t attack(bool holdsKey, size_t most) {
    auto socket = connectTo(where_, Deadline::after(20s));
    if (!socket.ok()) return 0;
    if (holdsKey) {
      auto shaken = handshakeNow(std::move(*socket), side_.context(),
                                 {.peer = kSessionListener,
                                  .lanes = 1,
                                  .deadline = Deadline::after(20s),
                                  .behindProof = {}});
      if (!shaken.ok()) return 0;
      *socket = std::move(shaken->socket);
    }
    size_t sent = 0;
    for (; sent < most; ++sent) {
      Bytes said(random_() % 200);
      for (auto& byte : said) byte = std::byte(random_());
      if (holdsKey && random_() % 2)
        said = spoiled(ByteWriter().putBytes(Question().encode()).take(), random_);
      const ssize_t gone = ::send(socket->get(), said.data(), said.size(), MSG_NOSIGNAL);
      if (gone < 0 && errno != EAGAIN) break;
    }
    return sent + 1;
  }

  std::minstd_rand random_{7};
  const std::shared_ptr<const Bytes> all_ = std::make_shared<const Bytes>(someSegment(3).encode());
  mooncake::testing::EngineSide side_{"the job's key", onLoopback()};
  std::unique_ptr<TransportContext> listens_;
  SessionId where_;
  std::shared_ptr<SessionServer> server_;
};

TEST_F(SessionPort, AnswersWhoeverAsksAmongThoseWhoBabble) {
  expectAnswers();
  bool holdsKey = false;
  size_t asked = 0;
  for (size_t sent = 0; sent < inputsToTry() / 20; holdsKey = !holdsKey) {
    sent += std::max<size_t>(attack(holdsKey, 1 + random_() % 20), 1);
    if (++asked % 20 == 0) expectAnswers();
  }
  expectAnswers();
}

}  // namespace
}  // namespace mooncake::transfer
