#include "wires/local/arena_offer.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "base/unix_socket.h"
#include "engine/memory/region_table.h"
#include "engine_side.h"

namespace mooncake::testing {
namespace {

class ArenaOfferTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    near_ = Fd(ends[0]);
    far_ = Fd(ends[1]);
    arena_ = std::move(*Arena::create(16 << 20));
    greeting_.fill(std::byte(9));
  }
  Status send() {
    return sendOffer(far_.get(), *arena_,
                     {.memfd = {},
                      .mirror = kMirror,
                      .exports = kExports,
                      .life = kLife,
                      .fence = kFence,
                      .greeting = greeting_});
  }
  // The bytes of a good offer, without its descriptor.
  Bytes offerBytes() {
    EXPECT_TRUE(send().ok());
    Bytes bytes;
    Fd fd;
    EXPECT_TRUE(receiveWithFd(near_.get(), 1000, bytes, fd).ok());
    return bytes;
  }
  Result<ArenaOffer> receiveNow() {
    OfferReader reader;
    const auto whole = reader.advance(near_.get());
    if (!whole.ok()) return whole.error();
    if (!*whole) return Error{ErrorCode::kTimeout, "the offer is not whole"};
    return reader.take();
  }
  ErrorCode receivedCode() {
    const auto offer = receiveNow();
    return offer.ok() ? ErrorCode::kOk : offer.error().code;
  }

  static constexpr uint64_t kMirror = 8192, kExports = 1 << 20, kLife = 4096, kFence = 12;
  Fd near_, far_;
  std::unique_ptr<Arena> arena_;
  Greeting greeting_{};
};

TEST_F(ArenaOfferTest, Arrives) {
  ASSERT_TRUE(send().ok());
  ASSERT_EQ(::write(far_.get(), "next", 4), 4);
  auto offer = receiveNow();
  ASSERT_TRUE(offer.ok()) << offer.error().message;
  EXPECT_EQ(offer->address, reinterpret_cast<uintptr_t>(arena_->base()));
  EXPECT_EQ(offer->bytes, arena_->capacity());
  EXPECT_EQ(offer->mirror, kMirror);
  EXPECT_EQ(offer->exports, kExports);
  EXPECT_EQ(offer->life, kLife);
  EXPECT_EQ(offer->fence, kFence);
  EXPECT_EQ(offer->greeting, greeting_);
  EXPECT_TRUE(ArenaMapping::map(std::move(offer->memfd), offer->bytes).ok());
  char next[8];
  EXPECT_EQ(::read(near_.get(), next, sizeof(next)), 4) << "nothing after the offer may be taken";
}

TEST_F(ArenaOfferTest, ArrivesInPiecesOnTheLoop) {
  const Bytes bytes = offerBytes();
  auto loop = EventLoop::start("test-io");
  ASSERT_TRUE(loop.ok());
  std::promise<Result<ArenaOffer>> done;
  receiveOffer(std::move(near_), **loop, Deadline::after(kPatience),
               [&](Fd, Result<ArenaOffer> offer) { done.set_value(std::move(offer)); });
  ASSERT_TRUE(sendWithFd(far_.get(), ByteView(bytes).first(1), arena_->fd()).ok());
  for (size_t i = 1; i < bytes.size(); ++i) {
    ASSERT_EQ(::write(far_.get(), &bytes[i], 1), 1);
    std::this_thread::yield();
  }
  EXPECT_TRUE(done.get_future().get().ok());
}

TEST_F(ArenaOfferTest, ASilentPeerIsDroppedAtTheDeadline) {
  auto loop = EventLoop::start("test-io");
  ASSERT_TRUE(loop.ok());
  std::promise<ErrorCode> done;
  receiveOffer(std::move(near_), **loop, Deadline::after(std::chrono::milliseconds(20)),
               [&](Fd, Result<ArenaOffer> offer) { done.set_value(offer.error().code); });
  EXPECT_EQ(done.get_future().get(), ErrorCode::kTimeout);
}

TEST_F(ArenaOfferTest, RefusesWhatDoesNotDecode) {
  const Bytes good = offerBytes();
  ASSERT_EQ(::write(far_.get(), good.data(), good.size()), static_cast<ssize_t>(good.size()));
  EXPECT_EQ(receivedCode(), ErrorCode::kProtocol) << "without a descriptor";
  // Mark, version, a mirror, exports, a life and a fence word that are not aligned or lie outside, an arena
  // that wraps around.
  for (const size_t at : {0, 4, 24, 30, 32, 38, 40, 46, 48, 54, 15}) {
    Bytes bad = good;
    bad[at] ^= std::byte(0xff);
    if (at == 15) bad[23] ^= std::byte(0xff);
    ASSERT_TRUE(sendWithFd(far_.get(), bad, arena_->fd()).ok());
    EXPECT_EQ(receivedCode(), ErrorCode::kProtocol) << at;
  }
  ASSERT_TRUE(sendWithFd(far_.get(), good, arena_->fd()).ok());
  EXPECT_EQ(receivedCode(), ErrorCode::kOk);
  ASSERT_TRUE(sendWithFd(far_.get(), ByteView(good).first(30), arena_->fd()).ok());
  far_.reset();
  EXPECT_EQ(receivedCode(), ErrorCode::kPeerLost);
}

TEST(UnixSocket, KeepsAtMostOneDescriptorPerMessage) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Fd near(ends[0]), far(ends[1]);
  const int fds[3] = {0, 1, 2};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
  char byte = 'x';
  iovec part{&byte, 1};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  cmsghdr* attached = CMSG_FIRSTHDR(&header);
  attached->cmsg_level = SOL_SOCKET;
  attached->cmsg_type = SCM_RIGHTS;
  attached->cmsg_len = CMSG_LEN(sizeof(fds));
  std::memcpy(CMSG_DATA(attached), fds, sizeof(fds));
  ASSERT_EQ(::sendmsg(far.get(), &header, 0), 1);
  const Fd before(::dup(0));
  Bytes message;
  Fd received;
  ASSERT_TRUE(receiveWithFd(near.get(), 10, message, received).ok());
  EXPECT_TRUE(received);
  const Fd after(::dup(0));
  EXPECT_EQ(after.get(), std::max(before.get(), received.get()) + 1) << "one new descriptor";
}

TEST(UnixSocket, SaysWhenNobodyListens) {
  const auto refused = connectAbstract("mooncake-nobody", Deadline::after(kPatience));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_FALSE(connectAbstract("", Deadline::after(kPatience)).ok());
  EXPECT_FALSE(connectAbstract(std::string(200, 'x'), Deadline::after(kPatience)).ok());
}

TEST(UnixSocket, AFullBacklogEndsAtTheDeadline) {
  const std::string name = "mooncake-test-" + Crypto::randomHex(16);
  const auto listener = listenAbstract(name);
  ASSERT_TRUE(listener.ok());
  ASSERT_EQ(::listen(listener->get(), 0), 0);  // no thread accepts; one connection may wait
  const auto first = connectAbstract(name, Deadline::after(kPatience));
  ASSERT_TRUE(first.ok());
  const auto second = connectAbstract(name, Deadline::after(std::chrono::milliseconds(20)));
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code, ErrorCode::kTimeout);
}

}  // namespace
}  // namespace mooncake::testing
