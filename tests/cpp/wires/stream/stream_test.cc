#include <future>
#include <latch>
#include <linux/sockios.h>
#include <memory>
#include <netinet/in.h>
#include <random>
#include <string_view>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "base/failpoint.h"
#include "engine_side.h"
#include "wires/stream/frame_receiver.h"
#include "wires/stream/send_queue.h"
#include "wires/stream/stream_connection.h"

namespace mooncake::testing {
namespace {

constexpr size_t kWord = 64, kData = 128;

std::pair<Fd, Fd> socketPair(int bufferBytes = 0) {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  for (int end : ends) {
    if (bufferBytes == 0) continue;
    EXPECT_EQ(::setsockopt(end, SOL_SOCKET, SO_SNDBUF, &bufferBytes, sizeof(bufferBytes)), 0);
  }
  return {Fd(ends[0]), Fd(ends[1])};
}

// Connected sockets over loopback, for options that unix sockets do not have.
std::pair<Fd, Fd> tcpPair() {
  const Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  EXPECT_EQ(::bind(listener.get(), generic, length), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), generic, &length), 0);
  Fd one(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(::connect(one.get(), generic, length), 0);
  Fd other(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK));
  EXPECT_TRUE(other);
  return {std::move(one), std::move(other)};
}

void sendAll(int socket, ByteView bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) bytes = bytes.subspan(sent);
    if (sent < 0 && errno != EAGAIN) return;  // the other side hung up
  }
}

// True if the other end has read all bytes that were sent into this unix socket.
bool isReadEmpty(int socket) {
  int unread = 0;
  return ::ioctl(socket, SIOCOUTQ, &unread) == 0 && unread == 0;
}

Bytes putFrame(const RemoteRegion& region, uint64_t offset, ByteView data, Signal signal) {
  wire::Header header{
      .kind = wire::Kind::kPut, .key = region.key, .offset = offset, .length = data.size()};
  header.signalOffset = signal.offset;
  header.stamp = signal.stamp;
  ByteWriter frame;
  frame.putRaw(wire::encode(header)).putRaw(data);
  return frame.take();
}

// Waits for the end of a connection, which must be reported once.
class Ending {
 public:
  StreamConnection::Events recorder() {
    return {.onMessage = [](ByteView) { ADD_FAILURE() << "nobody sent a message"; },
            .onClosed =
                [this](const Status& how) {
                  how_ = how;
                  count_.fetch_add(1);
                }};
  }
  Status wait() {
    EXPECT_TRUE(eventually([&] { return count_.load() > 0; }));
    return how_;
  }
  int count() const { return count_.load(); }

 private:
  Status how_;
  std::atomic<int> count_{0};
};

// Returns when the loop has handled all bytes that it has read from sockets by now.
void awaitHandlers(EventLoop& loop) {
  std::promise<void> done;
  loop.post([&] { done.set_value(); });
  done.get_future().wait();
}

// A connection on side a. Its peer is a second connection on b, or a bare socket of the test.
class StreamTest : public ::testing::Test {
 protected:
  void connect(int bufferBytes = 0) {
    auto [one, other] = socketPair(bufferBytes);
    toB = StreamConnection::start(std::move(one), a.loop(), a.regions(), endOfA.recorder());
    toA = StreamConnection::start(std::move(other), b.loop(), b.regions(), endOfB.recorder());
  }
  void connectBare() {
    auto [one, other] = socketPair();
    toB = StreamConnection::start(std::move(one), a.loop(), a.regions(), endOfA.recorder());
    bare = std::move(other);
  }
  void TearDown() override {
    if (toB) toB->close();
    if (toA) toA->close();
  }

  Doorbell bell;  // outlives the connections
  Ending endOfA, endOfB;
  EngineSide a, b;
  std::shared_ptr<StreamConnection> toB, toA;
  Fd bare;
};

TEST_F(StreamTest, PartialWritesKeepEveryByte) {
  connect(4096);
  auto atB = b.part(40 << 20);
  uint64_t number = 0;
  for (size_t bytes : {size_t(1), size_t(5000), size_t(300000), size_t(9 << 20)}) {
    const Bytes data = pattern(bytes, ++number);
    ASSERT_TRUE(toB->put({atB.remote(), kData, data, {kWord, stampOf(number)}}).ok());
    ASSERT_TRUE(eventually([&] { return atB.word(kWord).load() == stampOf(number); }));
    EXPECT_TRUE(atB.holds(kData, data));

    Bytes back(bytes);
    Completion completion(&bell);
    ASSERT_TRUE(toB->get({atB.remote(), kData, back, &completion}).ok());
    ASSERT_TRUE(eventually([&] { return completion.finished(); }));
    EXPECT_EQ(completion.error.load(), ErrorCode::kOk);
    EXPECT_TRUE(back == data);
  }
}

TEST_F(StreamTest, PutsAndAnswersShareASmallSocket) {
  connect(4096);
  constexpr size_t kBytes = 4 << 20;
  auto atA = a.part(kBytes), atB = b.part(1 << 20);
  const Bytes ofA = pattern(kBytes, 9);
  std::copy(ofA.begin(), ofA.end(), atA.bytes().begin());
  Bytes target(kBytes);
  Completion completion(&bell);
  ASSERT_TRUE(toA->get({atA.remote(), 0, target, &completion}).ok());
  for (uint64_t number = 1; number <= 100; ++number) {
    const size_t at = kData + 2048 * number;
    ASSERT_TRUE(toB->put({atB.remote(),
                          at,
                          pattern(2000, number),
                          {kWord + 8 * (number % 8), stampOf(number)}})
                    .ok());
  }
  ASSERT_TRUE(eventually([&] { return atB.word(kWord + 8 * (100 % 8)).load() == stampOf(100); }));
  for (uint64_t number = 1; number <= 100; ++number) {
    EXPECT_TRUE(atB.holds(kData + 2048 * number, pattern(2000, number)));
  }
  ASSERT_TRUE(eventually([&] { return completion.finished(); }));
  EXPECT_EQ(completion.error.load(), ErrorCode::kOk);
  EXPECT_TRUE(target == ofA);
}

// The receiver sleeps until a large part of a frame has come, never for more than the rest.
TEST_F(StreamTest, ALargePutEndsHoweverItsBytesCome) {
  auto [one, other] = tcpPair();
  toA = StreamConnection::start(std::move(other), b.loop(), b.regions(), endOfB.recorder());
  auto atB = b.part(4 << 20);
  uint64_t number = 0;
  for (const size_t bytes : {size_t(400) << 10, size_t(1300) << 10, size_t(3) << 20}) {
    const Bytes data = pattern(bytes, ++number);
    const Bytes frame = putFrame(atB.remote(), kData, data, {kWord, stampOf(number)});
    const ByteView all(frame);
    const size_t first = size_t(200) << 10;
    sendAll(one.get(), all.first(wire::kHeaderBytes + first));
    ASSERT_TRUE(eventually([&] { return atB.holds(kData, ByteView(data).first(64 << 10)); }));
    sendAll(one.get(), all.subspan(wire::kHeaderBytes + first));
    EXPECT_TRUE(eventually([&] { return atB.word(kWord).load() == stampOf(number); }));
    EXPECT_TRUE(atB.holds(kData, data));
  }
}

TEST_F(StreamTest, SealedHalfWayTakesNoFurtherByte) {
  connectBare();
  auto part = a.part(1 << 16);
  const Bytes frame =
      putFrame(part.remote(), kData, Bytes(20000, std::byte{7}), {kWord, stampOf(1)});
  sendAll(bare.get(), ByteView(frame).first(10000));
  const size_t arrived = kData + 10000 - wire::kHeaderBytes;
  ASSERT_TRUE(eventually([&] { return isReadEmpty(bare.get()); }));
  awaitHandlers(a.loop());
  part.word(kWord).store(stampOf(1) + 1);
  sendAll(bare.get(), ByteView(frame).subspan(10000));
  sendAll(bare.get(), putFrame(part.remote(), 1 << 15, bytesOf("next"), {kWord + 8, stampOf(1)}));
  ASSERT_TRUE(eventually([&] { return part.word(kWord + 8).load() == stampOf(1); }));
  EXPECT_TRUE(part.holds(arrived - 1, bytesOf("\x07")));
  EXPECT_TRUE(part.isZero(arrived, 20000 + kData - arrived));
  EXPECT_EQ(part.word(kWord).load(), stampOf(1) + 1);
}

TEST_F(StreamTest, RevokedHalfWayNeitherBlocksNorWrites) {
  connectBare();
  auto part = a.part(1 << 16), other = a.part(4096);
  const Bytes frame =
      putFrame(part.remote(), kData, Bytes(20000, std::byte{7}), {kWord, stampOf(1)});
  sendAll(bare.get(), ByteView(frame).first(10000));
  ASSERT_TRUE(eventually([&] { return isReadEmpty(bare.get()); }));
  part.revoke();  // returns although the peer has stopped in the middle of its put
  sendAll(bare.get(), ByteView(frame).subspan(10000));
  sendAll(bare.get(), putFrame(other.remote(), kData, bytesOf("next"), {kWord, stampOf(1)}));
  ASSERT_TRUE(eventually([&] { return other.word(kWord).load() == stampOf(1); }));
  EXPECT_TRUE(part.isZero(kData + 10000, 10000));
  EXPECT_EQ(part.word(kWord).load(), 0u);
}

TEST_F(StreamTest, RefusalsAreCountedAndNothingIsWritten) {
  connectBare();
  auto part = a.part(4096), readOnly = a.part(4096, kRemoteRead), live = a.part(4096);
  const Bytes data = pattern(5000, 1);
  sendAll(bare.get(), putFrame(part.remote(), kData, data, {kWord, stampOf(1)}));  // too long
  sendAll(bare.get(), putFrame(part.remote(), kData, ByteView(data).first(8),
                               {4096, stampOf(1)}));  // word outside
  sendAll(bare.get(),
          putFrame(part.remote(), 0, ByteView(data).first(8), {kWord, stampOf(1)}));  // on the bell
  sendAll(bare.get(),
          putFrame(readOnly.remote(), kData, ByteView(data).first(8), {kWord, stampOf(1)}));
  sendAll(bare.get(), putFrame(live.remote(), kData, ByteView(data).first(8), {kWord, stampOf(1)}));
  ASSERT_TRUE(eventually([&] { return live.word(kWord).load() == stampOf(1); }));
  EXPECT_TRUE(part.isZero(0, 4096));
  EXPECT_TRUE(readOnly.isZero(0, 4096));
  EXPECT_EQ(a.regions().refusals(), 3u);
  EXPECT_EQ(endOfA.count(), 0);
}

TEST_F(StreamTest, BadRequestsAreTheCallersFault) {
  connect();
  auto part = b.part(4096);
  const Bytes data = pattern(8, 1);
  EXPECT_EQ(toB->put({part.remote(), kData, data, {kWord + 4, stampOf(1)}}).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(toB->put({part.remote(), kData, data, {0, stampOf(1)}}).code(),
            ErrorCode::kInvalidArgument);
  const Bytes huge(wire::kMaxPutBytes + 1);
  EXPECT_EQ(toB->put({part.remote(), kData, huge, {kWord, stampOf(1)}}).code(),
            ErrorCode::kInvalidArgument);
}

TEST_F(StreamTest, UnaskedAnswersEndTheConnection) {
  for (const auto kind : {wire::Kind::kAnswer, wire::Kind::kPiece}) {
    Ending end;
    auto [one, other] = socketPair();
    auto connection =
        StreamConnection::start(std::move(one), a.loop(), a.regions(), end.recorder());
    sendAll(
        other.get(),
        wire::encode({.kind = kind, .request = 3, .length = kind == wire::Kind::kPiece ? 8u : 0u}));
    EXPECT_EQ(end.wait().code(), ErrorCode::kProtocol);
    connection->close();
  }
}

TEST_F(StreamTest, ShortAndLongAnswersEndTheConnection) {
  for (const uint64_t pieceBytes : {uint64_t(0), uint64_t(50), uint64_t(101)}) {
    Ending end;
    auto [one, other] = socketPair();
    auto connection =
        StreamConnection::start(std::move(one), a.loop(), a.regions(), end.recorder());
    Bytes target(100);
    Completion completion(&bell);
    ASSERT_TRUE(connection->get({{}, 0, target, &completion}).ok());
    const uint64_t request = 0;  // the first request of a connection
    if (pieceBytes > 0) {
      sendAll(other.get(),
              wire::encode({.kind = wire::Kind::kPiece, .request = request, .length = pieceBytes}));
      sendAll(other.get(), Bytes(pieceBytes));
    }
    sendAll(other.get(), wire::encode({.kind = wire::Kind::kAnswer, .request = request}));
    EXPECT_EQ(end.wait().code(), ErrorCode::kProtocol);
    EXPECT_TRUE(completion.finished());
    EXPECT_EQ(completion.error.load(), ErrorCode::kPeerLost);
  }
}

TEST_F(StreamTest, TooManyGetsOfThePeerEndTheConnection) {
  connectBare();
  auto part = a.part(1 << 20);
  ByteWriter flood;
  for (uint64_t i = 0; i < wire::kMaxTransfers + 64; ++i) {
    flood.putRaw(wire::encode(
        {.kind = wire::Kind::kGet, .request = i, .key = part.remote().key, .length = 1 << 20}));
  }
  sendAll(bare.get(), flood.bytes());
  EXPECT_EQ(endOfA.wait().code(), ErrorCode::kProtocol);
}

TEST_F(StreamTest, GetsBeyondTheTableAreRefusedHere) {
  connectBare();
  std::vector<std::byte> target(8);
  Completion completion(&bell);
  for (uint64_t i = 0; i < wire::kMaxTransfers; ++i)
    ASSERT_TRUE(toB->get({{}, 0, target, &completion}).ok());
  EXPECT_EQ(toB->unansweredBytes(), 8 * wire::kMaxTransfers);
  EXPECT_EQ(toB->get({{}, 0, target, &completion}).code(), ErrorCode::kExhausted);
  toB->cancel(&completion);
  EXPECT_TRUE(completion.finished());
  EXPECT_EQ(completion.error.load(), ErrorCode::kAborted);
}

TEST_F(StreamTest, APeerThatDoesNotReadCostsBoundedMemory) {
  connectBare();
  auto part = b.part(4096);
  const Bytes data(wire::kMaxPutBytes);
  Status last;
  for (int i = 0; i < 6 && last.ok(); ++i)
    last = toB->put({part.remote(), kData, data, {kWord, stampOf(1)}});
  EXPECT_EQ(last.code(), ErrorCode::kExhausted);
}

TEST_F(StreamTest, ADeadPeerEndsTheGets) {
  connectBare();
  Bytes target(1000);
  Completion completion(&bell);
  ASSERT_TRUE(toB->get({{}, 0, target, &completion}).ok());
  bare.reset();
  EXPECT_EQ(endOfA.wait().code(), ErrorCode::kPeerLost);
  EXPECT_TRUE(completion.finished());
  EXPECT_EQ(completion.error.load(), ErrorCode::kPeerLost);
  EXPECT_EQ(toB->put({{}, kData, target, {kWord, stampOf(1)}}).code(), ErrorCode::kPeerLost);
  EXPECT_EQ(endOfA.count(), 1);
}

// The fence has withdrawn the get, and ends it later: the completion must stay until then.
TEST_F(StreamTest, CancelWaitsForAFenceThatEndsTheGet) {
  static std::latch* hasWithdrawn = nullptr;
  static std::latch* mayEnd = nullptr;
  std::latch first(1), second(1);
  hasWithdrawn = &first;
  mayEnd = &second;
  observeFailpoints([](const char* name) {
    if (std::string_view(name) != "withdrawn") return;
    hasWithdrawn->count_down();
    mayEnd->wait();
  });
  connectBare();
  Bytes target(1000);
  auto completion = std::make_unique<Completion>(&bell);
  ASSERT_TRUE(toB->get({{}, 0, target, completion.get()}).ok());
  auto fencing = std::async(std::launch::async, [&] { toB->fence(); });
  first.wait();
  auto cancelling = std::async(std::launch::async, [&] { toB->cancel(completion.get()); });
  EXPECT_EQ(cancelling.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  second.count_down();
  cancelling.get();
  EXPECT_TRUE(completion->finished());
  EXPECT_EQ(completion->error.load(), ErrorCode::kAborted);
  completion.reset();
  fencing.get();
  observeFailpoints([](const char*) {});
  areFailpointsOn = false;
}

TEST_F(StreamTest, GoodbyeIsNoDeath) {
  connect();
  toB->close();
  EXPECT_TRUE(endOfB.wait().ok());
  EXPECT_EQ(endOfA.count(), 0);
}

// A caller of close() may destroy objects that onClosed uses.
TEST_F(StreamTest, CloseWaitsForTheEndThatIsBeingReported) {
  auto [one, other] = socketPair();
  std::latch isMade(1), began(1), mayEnd(1);
  const auto closed = [&](const Status&) {
    isMade.wait();
    toB->close();  // must not wait for itself
    began.count_down();
    mayEnd.wait();
  };
  toB = StreamConnection::start(std::move(one), a.loop(), a.regions(),
                                {.onMessage = {}, .onClosed = closed});
  isMade.count_down();
  other.reset();
  began.wait();
  auto closing = std::async(std::launch::async, [&] { toB->close(); });
  EXPECT_EQ(closing.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  mayEnd.count_down();
}

// Bytes in the socket cannot be overtaken. A turn that wrote as much as possible would make the
// next frames wait for it.
TEST(SendQueueTest, ACallSendsNoMoreThanItMay) {
  constexpr size_t kBytes = size_t(4) << 20, kMost = size_t(64) << 10;
  RegionTable regions;
  TransferTable transfers;
  SendQueue queue(regions, transfers);
  Bytes memory(kBytes);
  auto region = regions.add(memory.data(), memory.size(), kRemoteRead);
  ASSERT_TRUE(region.ok());
  for (const uint64_t length : {kBytes / 2, kMost / 4, kBytes / 4}) {
    ASSERT_TRUE(queue.answer(
        {.kind = wire::Kind::kGet, .request = 1, .key = region->remote().key, .length = length}));
  }
  auto [here, there] = socketPair(300 << 10);
  Bytes sink(kMost);
  while (!queue.empty()) {
    const auto sent = queue.sendSome(here.get(), kMost);
    ASSERT_TRUE(sent.ok());
    EXPECT_LE(*sent, kMost + 8 * wire::kHeaderBytes);
    while (::recv(there.get(), sink.data(), sink.size(), MSG_DONTWAIT) > 0) {
    }
  }
}

// If a request waited for all answers before it, two peers that fetch from each other would take
// turns.
TEST(SendQueueTest, AFrameWaitsForOnePieceAtMost) {
  constexpr size_t kAnswer = size_t(4) << 20;
  RegionTable regions;
  TransferTable transfers;
  SendQueue queue(regions, transfers);
  Bytes memory(kAnswer);
  auto region = regions.add(memory.data(), memory.size(), kRemoteRead);
  ASSERT_TRUE(region.ok());
  ASSERT_TRUE(queue.answer(
      {.kind = wire::Kind::kGet, .request = 1, .key = region->remote().key, .length = kAnswer}));
  auto [here, there] = socketPair(300 << 10);
  for (size_t some = 1; some > 0;) {
    const auto taken = queue.sendSome(here.get());
    ASSERT_TRUE(taken.ok());
    some = *taken;
  }
  ASSERT_FALSE(queue.betweenFrames()) << "the socket took whole pieces: the test shows nothing";
  queue.add({.kind = wire::Kind::kBeat});

  Bytes sent(kAnswer + (size_t(1) << 20));
  size_t got = 0, before = 0;
  while (!queue.empty()) {
    const ssize_t read = ::recv(there.get(), sent.data() + got, sent.size() - got, 0);
    if (read > 0) got += size_t(read);
    if (before == 0) before = got;  // bytes that were in the socket
    ASSERT_TRUE(queue.sendSome(here.get()).ok());
  }
  size_t beatAt = 0;
  for (size_t at = 0; at + wire::kHeaderBytes <= got && beatAt == 0;) {
    const auto header = wire::decode(ByteView(sent).subspan(at, wire::kHeaderBytes));
    ASSERT_TRUE(header.ok());
    if (header->kind == wire::Kind::kBeat) beatAt = at;
    at += wire::kHeaderBytes + (wire::hasPayload(header->kind) ? header->length : 0);
  }
  ASSERT_GT(beatAt, 0u);
  EXPECT_LE(beatAt, before + wire::kMaxPieceBytes + wire::kHeaderBytes);
}

TEST(WireTest, EveryFieldComesBack) {
  const wire::Header put{
      .kind = wire::Kind::kPut, .key = 1, .offset = 2, .length = 3, .signalOffset = 64, .stamp = 5};
  const auto decoded = wire::decode(wire::encode(put));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->kind, wire::Kind::kPut);
  EXPECT_EQ(decoded->key, 1u);
  EXPECT_EQ(decoded->offset, 2u);
  EXPECT_EQ(decoded->length, 3u);
  EXPECT_EQ(decoded->signalOffset, 64u);
  EXPECT_EQ(decoded->stamp, 5u);
  const auto get = wire::decode(wire::encode({.kind = wire::Kind::kGet,
                                              .request = 1,
                                              .key = 2,
                                              .offset = 3,
                                              .length = uint64_t(5) << 32}));
  ASSERT_TRUE(get.ok());
  EXPECT_EQ(get->length, uint64_t(5) << 32) << "beyond 4 GiB";
}

// Random bytes, and good frames with a few bytes changed. Bytes that decode encode to the same
// bytes again.
TEST(WireTest, GarbageDecodesToNothingOrToItself) {
  std::mt19937_64 random(20261121);
  size_t accepted = 0;
  for (int i = 0; i < 100000; ++i) {
    wire::HeaderBytes bytes =
        wire::encode({.kind = static_cast<wire::Kind>(1 + random() % 5), .request = random()});
    const size_t changes = i % 2 ? bytes.size() : 1 + random() % 4;
    for (size_t c = 0; c < changes; ++c)
      bytes[i % 2 ? c : random() % bytes.size()] = std::byte(random());
    const size_t length = i % 10 ? bytes.size() : random() % bytes.size();
    const auto header = wire::decode(ByteView(bytes).first(length));
    if (!header.ok()) continue;
    ++accepted;
    EXPECT_TRUE(wire::encode(*header) == bytes);
  }
  EXPECT_GT(accepted, 0u);
  EXPECT_LT(accepted, 50000u);
}

// Feeds whole connections with broken frames and garbage, cut anywhere. Memory does not change, and
// the receiver says why it stopped.
TEST(FrameReceiverTest, GarbageChangesNoState) {
  EngineSide side;
  auto part = side.part(4096);
  const Bytes before = pattern(4096, 1);
  std::copy(before.begin(), before.end(), part.bytes().begin());
  part.word(kWord).store(~uint64_t(0));  // higher than any stamp: even a whole frame writes nothing
  const Bytes sealed(part.bytes().begin(), part.bytes().end());
  std::mt19937_64 random(7);
  for (int stream = 0; stream < 2000; ++stream) {
    TransferTable transfers;
    FrameReceiver receiver(side.regions(), transfers,
                           {.onGet = [](const wire::Header&) { return true; },
                            .onWritten = [](uint64_t, wire::AnswerStatus) {},
                            .onPull = nullptr,
                            .onUnpullable = nullptr,
                            .awaitSender = [] {}});
    auto [ours, theirs] = socketPair();
    Bytes bytes =
        putFrame(part.remote(), 1024 + random() % 2000, pattern(200, stream), {kWord, stampOf(1)});
    if (random() % 2) bytes[random() % 8] = std::byte(random());  // mark, version, kind or status
    for (size_t extra = 0; extra < 500; ++extra) bytes.push_back(std::byte(random()));
    bytes.resize(1 + random() % bytes.size());
    sendAll(theirs.get(), bytes);
    theirs.reset();
    Result<FrameReceiver::Stop> stop = FrameReceiver::Stop::kDrained;
    while (stop.ok() && *stop != FrameReceiver::Stop::kGoodbye)
      stop = receiver.receive(ours.get(), 64 + random() % 512);
    if (!stop.ok()) {
      EXPECT_TRUE(stop.error().code == ErrorCode::kProtocol ||
                  stop.error().code == ErrorCode::kPeerLost);
    }
  }
  EXPECT_TRUE(part.holds(0, sealed));
  EXPECT_EQ(side.regions().refusals(), 0u);
}

// The number of bytes that do not wake the sleeper must be less than the rest of the frame.
// Otherwise it would wait for the end of the frame in vain.
TEST(FrameReceiverTest, AwaitsNoMoreThanComes) {
  EngineSide side;
  constexpr size_t kBytes = size_t(1) << 20, kChunk = size_t(150) << 10;
  auto part = side.part(2 * kBytes);
  TransferTable transfers;
  FrameReceiver receiver(side.regions(), transfers, {});
  auto [ours, theirs] = socketPair(2 * kChunk);
  const Bytes frame = putFrame(part.remote(), kData, pattern(kBytes, 1), {kWord, stampOf(1)});
  int most = 1;
  size_t sent = 0;
  for (size_t turn = 0; receiver.receivedBytes() < frame.size(); ++turn) {
    const size_t now = sent == receiver.receivedBytes() ? std::min(kChunk, frame.size() - sent) : 0;
    sendAll(theirs.get(), ByteView(frame).subspan(sent, now));
    sent += now;
    ASSERT_TRUE(receiver.receive(ours.get(), turn % 2 ? kBytes : kChunk / 2).ok());
    int least = 0;
    socklen_t length = sizeof(least);
    ASSERT_EQ(::getsockopt(ours.get(), SOL_SOCKET, SO_RCVLOWAT, &least, &length), 0);
    EXPECT_LE(size_t(least), std::max<size_t>(1, frame.size() - receiver.receivedBytes()));
    most = std::max(most, least);
  }
  EXPECT_GT(most, 1);
  EXPECT_EQ(part.word(kWord).load(), stampOf(1));
}

}  // namespace
}  // namespace mooncake::testing
