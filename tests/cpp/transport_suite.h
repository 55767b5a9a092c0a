#pragma once

#include "wire_end.h"

namespace mooncake::testing {

// Reads a byte that may be written at the same time; ThreadSanitizer ignores this intended race.
__attribute__((noinline, no_sanitize("thread"))) inline std::byte peek(const std::byte* at) {
  return *static_cast<const volatile std::byte*>(at);
}

}  // namespace mooncake::testing

// Tests that every transport must pass. A transport's test file says
//
//   struct Tcp {
//     static Result<std::unique_ptr<Transport>> create(const TransportContext& context);
//     static EngineEnv env();  // of its engines
//   };
//   INSTANTIATE_TYPED_TEST_SUITE_P(Tcp, TransportSuite, Tcp);
//
// and adds tests for its special features. Two engines, a and b, live in this process; a connects
// to b.
namespace mooncake::testing {

template <typename Wire>
class TransportSuite : public ConnectedTest {
 protected:
  struct End : WireEnd {
    explicit End(std::string_view key = "the job's key")
        : WireEnd(Wire::env(), Wire::create, key) {}
  };

  static auto soon() { return Deadline::after(kPatience); }
  void SetUp() override { connect(a, b); }
  static bool stamped(const Part& part, uint64_t stamp) {
    return part.word(kWord).load(std::memory_order_acquire) == stamp;
  }

  End a, b;
};

TYPED_TEST_SUITE_P(TransportSuite);

TYPED_TEST_P(TransportSuite, PutsArriveBothWays) {
  auto atA = this->a.part(1 << 16), atB = this->b.part(1 << 16);
  for (uint64_t number = 1; number <= 20; ++number) {
    expectPutArrives(*this->toB, atB, number);
    expectPutArrives(*this->toA, atA, number);
  }
}

TYPED_TEST_P(TransportSuite, PutOfAllSizes) {
  constexpr size_t kLargest = 8 << 20;
  auto part = this->b.part(kLargest + 4096);
  uint64_t number = 0;
  for (size_t bytes :
       {size_t(0), size_t(1), size_t(7), size_t(4095), size_t(8192), size_t(100003), kLargest}) {
    const Bytes data = pattern(bytes, ++number);
    ASSERT_TRUE(this->toB->put({part.remote(), kData, data, {kWord, stampOf(number)}}).ok());
    ASSERT_TRUE(eventually([&] { return this->stamped(part, stampOf(number)); })) << bytes;
    EXPECT_TRUE(part.holds(kData, data)) << bytes;
  }
}

TYPED_TEST_P(TransportSuite, PutDataMayBeReusedAtOnce) {
  constexpr size_t kBytes = 1 << 20;
  auto part = this->b.part(16 * kBytes + 4096);
  Bytes data;
  for (uint64_t i = 0; i < 16; ++i) {
    data = pattern(kBytes, i);
    const Signal signal{kWord + 8 * i, stampOf(1)};
    ASSERT_TRUE(this->toB->put({part.remote(), 4096 + i * kBytes, data, signal}).ok());
    std::fill(data.begin(), data.end(), std::byte{0xee});
  }
  for (uint64_t i = 0; i < 16; ++i) {
    ASSERT_TRUE(eventually([&] { return part.word(kWord + 8 * i).load() == stampOf(1); }));
    EXPECT_TRUE(part.holds(4096 + i * kBytes, pattern(kBytes, i)));
  }
}

TYPED_TEST_P(TransportSuite, PutToASealedWordWritesNothing) {
  auto part = this->b.part(4096);
  part.word(72).store(stampOf(5) + 1);
  const Bytes data = pattern(500, 1);
  (void)this->toB->put({part.remote(), 1024, data, {72, stampOf(5)}});
  (void)this->toB->put({part.remote(), 1024, data, {72, stampOf(4)}});
  expectPutArrives(*this->toB, part, 1);
  EXPECT_EQ(part.word(72).load(), stampOf(5) + 1);
  EXPECT_TRUE(part.isZero(1024, 500));
}

TYPED_TEST_P(TransportSuite, PutIsAnnouncedInAnotherRegion) {
  auto part = this->b.part(4096);
  auto memory = this->b.part(4 << 20);
  const Bytes data = pattern(3 << 20, 7);
  ASSERT_TRUE(
      this->toB->put({memory.remote(), 1024, data, {kWord, stampOf(1)}, part.remote()}).ok());
  ASSERT_TRUE(eventually([&] { return this->stamped(part, stampOf(1)); }));
  EXPECT_TRUE(memory.holds(1024, data));
  EXPECT_TRUE(memory.isZero(kWord, 8)) << "the word of that offset there is data";

  // Stamps that are too old are dropped, in any region. Neither of the two regions may be unknown.
  (void)this->toB->put({memory.remote(), 1024, pattern(64, 9), {kWord, stampOf(1)}, part.remote()});
  RemoteRegion unknown = part.remote();
  unknown.key += 0x100000;
  (void)this->toB->put({memory.remote(), 1024, pattern(64, 9), {kWord, stampOf(2)}, unknown});
  (void)this->toB->put({unknown, 1024, pattern(64, 9), {kWord, stampOf(2)}, part.remote()});
  (void)this->toB->put({memory.remote(), 8, pattern(64, 9), {kWord, stampOf(2)}, part.remote()});
  (void)this->toB->put(
      {memory.remote(), 4 << 20, pattern(64, 9), {kWord, stampOf(2)}, part.remote()});
  expectPutArrives(*this->toB, part, 3);
  EXPECT_TRUE(memory.holds(1024, data));
}

TYPED_TEST_P(TransportSuite, PutWakesASleeper) {
  auto part = this->b.part(4096);
  Interrupt interrupt;
  WaitResult result{};
  std::thread sleeper([&] {
    const Waiter waiter{part.bell(), interrupt, 0, this->soon(),
                        SpinPolicy{.pauses = 0, .yields = 0}};
    result = waiter.until([&] { return this->stamped(part, stampOf(1)); });
  });
  EXPECT_TRUE(eventually([&] { return part.bell().sleepers.load() != 0; }));
  EXPECT_TRUE(this->toB->put({part.remote(), kData, {}, {kWord, stampOf(1)}}).ok());
  sleeper.join();
  EXPECT_EQ(result, WaitResult::kReady);
}

// A region may name a bell elsewhere in the arena. Then the place at its start is no bell.
TYPED_TEST_P(TransportSuite, PutRingsTheBellThatItsRegionNames) {
  auto other = this->b.part(4096);
  auto part = this->b.part(4096, kRemoteRead | kRemoteWrite, &other.bell());
  auto plain = this->b.part(4096);
  for (Part* one : {&other, &part, &plain}) one->bell().sleepers = 1;
  ASSERT_TRUE(this->toB->put({part.remote(), kData, {}, {kWord, stampOf(1)}}).ok());
  EXPECT_TRUE(eventually([&] { return other.bell().rings == 1; }));
  ASSERT_TRUE(this->toB->put({plain.remote(), kData, {}, {kWord, stampOf(2)}, part.remote()}).ok());
  EXPECT_TRUE(eventually([&] { return other.bell().rings == 2; })) << "the word's region counts";
  ASSERT_TRUE(this->toB->put({plain.remote(), kData, {}, {kWord, stampOf(1)}}).ok());
  EXPECT_TRUE(eventually([&] { return plain.bell().rings == 1; }));
  EXPECT_EQ(part.bell().rings, 0u);
  EXPECT_EQ(other.bell().rings, 2u);
  // The place of the key serves a region without a bell by now.
  part.revoke();
  auto next = this->b.part(4096);
  next.bell().sleepers = 1;
  ASSERT_TRUE(this->toB->put({next.remote(), kData, {}, {kWord, stampOf(1)}}).ok());
  EXPECT_TRUE(eventually([&] { return next.bell().rings == 1; }));
  EXPECT_EQ(other.bell().rings, 2u);
}

TYPED_TEST_P(TransportSuite, PutOutsideIsRefusedAndTheChannelLives) {
  auto part = this->b.part(4096);
  auto guard = this->b.part(4096);
  const Bytes data = pattern(100, 1);
  RemoteRegion unknown = part.remote();
  unknown.key += 0x100000;
  (void)this->toB->put({part.remote(), 4096 - 99, data, {kWord, stampOf(1)}});
  (void)this->toB->put({part.remote(), ~uint64_t(0) - 10, data, {kWord, stampOf(1)}});
  (void)this->toB->put({part.remote(), 1024, data, {4096, stampOf(1)}});
  (void)this->toB->put({unknown, 1024, data, {kWord, stampOf(1)}});
  expectPutArrives(*this->toB, part, 1);
  EXPECT_TRUE(part.isZero(kData + 100, 4096 - kData - 100));
  EXPECT_TRUE(guard.isZero(0, 4096));
}

TYPED_TEST_P(TransportSuite, PutToARevokedRegionWritesNothing) {
  auto part = this->b.part(4096);
  auto revoked = this->b.part(4096);
  const RemoteRegion remote = revoked.remote();
  revoked.revoke();
  (void)this->toB->put({remote, kData, pattern(100, 1), {kWord, stampOf(1)}});
  expectPutArrives(*this->toB, part, 1);
  EXPECT_TRUE(revoked.isZero(0, 4096));
}

TYPED_TEST_P(TransportSuite, PutsOfManyThreads) {
  constexpr size_t kThreads = 4, kPuts = 200, kBytes = 3000;
  auto part = this->b.part(4096 + kThreads * kPuts * (kBytes + 72));
  const auto wordOf = [](size_t thread, size_t put) { return 64 + 8 * (thread * kPuts + put); };
  const auto dataOf = [&](size_t thread, size_t put) {
    return wordOf(kThreads, 0) + (thread * kPuts + put) * kBytes;
  };
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < kPuts; ++i) {
        EXPECT_TRUE(this->toB
                        ->put({part.remote(),
                               dataOf(t, i),
                               pattern(kBytes, t * kPuts + i),
                               {wordOf(t, i), stampOf(1)}})
                        .ok());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t t = 0; t < kThreads; ++t) {
    for (size_t i = 0; i < kPuts; ++i) {
      ASSERT_TRUE(eventually([&] { return part.word(wordOf(t, i)).load() == stampOf(1); }));
      EXPECT_TRUE(part.holds(dataOf(t, i), pattern(kBytes, t * kPuts + i)));
    }
  }
}

TYPED_TEST_P(TransportSuite, MessagesArriveInOrderAmongPutsAndGets) {
  constexpr size_t kMessages = 200, kMost = 64 << 10;
  auto part = this->b.part(1 << 20);
  Completion completion(&this->bell);
  Bytes target(1 << 20);
  for (size_t i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(this->toB->send(pattern(i % 10 == 9 ? kMost : i + 1, i)).ok());
    ASSERT_TRUE(this->toA->send(pattern(1, i)).ok());
    ASSERT_TRUE(this->toB->put({part.remote(), 128, pattern(5000, i), {64, stampOf(i + 1)}}).ok());
    if (i % 20 == 0) {
      ASSERT_TRUE(this->toB->get({part.remote(), 0, target, &completion}).ok());
    }
  }
  const auto atB = this->b.messagesFrom(this->a.id(), kMessages);
  const auto atA = this->a.messagesFrom(this->b.id(), kMessages);
  ASSERT_EQ(atB.size(), kMessages);
  ASSERT_EQ(atA.size(), kMessages);
  for (size_t i = 0; i < kMessages; ++i) {
    EXPECT_EQ(atB[i], pattern(i % 10 == 9 ? kMost : i + 1, i));
    EXPECT_EQ(atA[i], pattern(1, i));
  }
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
}

TYPED_TEST_P(TransportSuite, MessagesHaveASize) {
  EXPECT_EQ(this->toB->send({}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(this->toB->send(Bytes((64 << 10) + 1)).code(), ErrorCode::kInvalidArgument);
  ASSERT_TRUE(this->toB->send(Bytes(1)).ok());
  EXPECT_EQ(this->b.messagesFrom(this->a.id(), 1).size(), 1u);
}

// Messages that a peer sent before it left still arrive.
TYPED_TEST_P(TransportSuite, MessagesComeBeforeTheGoodbye) {
  ASSERT_TRUE(this->toB->send(pattern(1000, 1)).ok());
  this->toB->close();
  EXPECT_TRUE(this->b.endOf(this->a.id()).ok());
  EXPECT_EQ(this->b.messagesFrom(this->a.id(), 1), std::vector<Bytes>{pattern(1000, 1)});
  EXPECT_FALSE(this->toB->send(Bytes(1)).ok());
}

TYPED_TEST_P(TransportSuite, GetOfAllSizes) {
  constexpr size_t kBytes = 20 << 20;
  auto part = this->b.part(kBytes, kRemoteRead);
  const Bytes data = pattern(kBytes, 3);
  std::copy(data.begin(), data.end(), part.bytes().begin());
  for (size_t bytes : {size_t(0), size_t(1), size_t(4097), size_t(1 << 20) + 5, kBytes - 77}) {
    Bytes target(bytes + 1);
    Completion completion(&this->bell);
    const std::span<std::byte> into(target.data(), bytes);
    ASSERT_TRUE(this->toB->get({part.remote(), 77, into, &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kOk) << bytes;
    EXPECT_TRUE(std::equal(into.begin(), into.end(), data.begin() + 77)) << bytes;
    EXPECT_EQ(target.back(), std::byte{0});
  }
}

TYPED_TEST_P(TransportSuite, ManyGetsBothWaysAtOnce) {
  constexpr size_t kGets = 96, kBytes = 256 << 10;
  auto atA = this->a.part(kGets * kBytes), atB = this->b.part(kGets * kBytes);
  const Bytes ofA = pattern(kGets * kBytes, 1), ofB = pattern(kGets * kBytes, 2);
  std::copy(ofA.begin(), ofA.end(), atA.bytes().begin());
  std::copy(ofB.begin(), ofB.end(), atB.bytes().begin());
  Bytes fromA(kGets * kBytes), fromB(kGets * kBytes);
  Completion completion(&this->bell);
  for (size_t i = 0; i < kGets; ++i) {
    const std::span<std::byte> intoB(fromA.data() + i * kBytes, kBytes),
        intoA(fromB.data() + i * kBytes, kBytes);
    ASSERT_TRUE(this->toB->get({atB.remote(), i * kBytes, intoA, &completion}).ok());
    ASSERT_TRUE(this->toA->get({atA.remote(), i * kBytes, intoB, &completion}).ok());
  }
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  EXPECT_TRUE(fromA == ofA);
  EXPECT_TRUE(fromB == ofB);
}

TYPED_TEST_P(TransportSuite, PutsGoThroughWhileGetsAreUnderWay) {
  constexpr size_t kBytes = 64 << 20;
  auto atA = this->a.part(kBytes), atB = this->b.part(4096);
  Bytes target(kBytes);
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toA->get({atA.remote(), 0, target, &completion}).ok());
  for (uint64_t number = 1; number <= 50; ++number) expectPutArrives(*this->toB, atB, number);
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
}

TYPED_TEST_P(TransportSuite, GetOutsideFails) {
  auto part = this->b.part(4096, kRemoteRead);
  std::fill(part.bytes().begin(), part.bytes().end(), std::byte{7});
  auto live = this->b.part(4096);
  RemoteRegion unknown = part.remote();
  unknown.key += 0x100000;
  Bytes target(100);
  const std::pair<RemoteRegion, uint64_t> wrong[] = {
      {part.remote(), 4096 - 99}, {part.remote(), ~uint64_t(0) - 10}, {unknown, 0}};
  for (const auto& [region, offset] : wrong) {
    Completion completion(&this->bell);
    const Status begun = this->toB->get({region, offset, target, &completion});
    const ErrorCode end = endOf(completion);
    EXPECT_TRUE(!begun.ok() || end != ErrorCode::kOk);
    EXPECT_TRUE(
        std::all_of(target.begin(), target.end(), [](std::byte b) { return b == std::byte{0}; }));
  }
  expectPutArrives(*this->toB, live, 1);
}

TYPED_TEST_P(TransportSuite, CancelEndsTheGetsOfOneCompletion) {
  constexpr size_t kGets = 64, kBytes = 1 << 20;
  auto part = this->b.part(kGets * kBytes);
  std::fill(part.bytes().begin(), part.bytes().end(), std::byte{7});
  Bytes target(kGets * kBytes), kept(kBytes);
  Completion cancelled(&this->bell), other(&this->bell);
  for (size_t i = 0; i < kGets; ++i) {
    ASSERT_TRUE(
        this->toB
            ->get({part.remote(), i * kBytes, {target.data() + i * kBytes, kBytes}, &cancelled})
            .ok());
  }
  ASSERT_TRUE(this->toB->get({part.remote(), 0, kept, &other}).ok());
  this->toB->cancel(&cancelled);
  ASSERT_TRUE(cancelled.finished());
  std::fill(target.begin(), target.end(), std::byte{1});
  EXPECT_EQ(endOf(other), ErrorCode::kOk);
  EXPECT_TRUE(std::all_of(kept.begin(), kept.end(), [](std::byte b) { return b == std::byte{7}; }));
  EXPECT_TRUE(
      std::all_of(target.begin(), target.end(), [](std::byte b) { return b == std::byte{1}; }));
}

TYPED_TEST_P(TransportSuite, CloseEndsGetsAndSaysGoodbye) {
  constexpr size_t kBytes = 16 << 20;
  auto part = this->b.part(kBytes);
  Bytes target(kBytes);
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toB->get({part.remote(), 0, target, &completion}).ok());
  this->toB->close();
  EXPECT_TRUE(completion.finished());
  EXPECT_FALSE(this->toB->put({part.remote(), 128, {}, {64, stampOf(1)}}).ok());
  Completion late(&this->bell);
  EXPECT_FALSE(this->toB->get({part.remote(), 0, target, &late}).ok());
  EXPECT_TRUE(late.finished());
  this->toB->close();
  const Status how = this->b.endOf(this->a.id());
  EXPECT_TRUE(how.ok()) << how.error().message;
  EXPECT_EQ(this->a.endedCount(), 0u) << "nobody reports its own close()";
}

TYPED_TEST_P(TransportSuite, RegionsCanGoWhileTheyAreRead) {
  constexpr size_t kBytes = 32 << 20;
  auto part = this->b.part(kBytes);
  std::fill(part.bytes().begin(), part.bytes().end(), std::byte{7});
  Bytes target(kBytes);
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toB->get({part.remote(), 0, target, &completion}).ok());
  part.revoke();
  if (endOf(completion) == ErrorCode::kOk) {
    EXPECT_TRUE(
        std::all_of(target.begin(), target.end(), [](std::byte b) { return b == std::byte{7}; }));
  }
}

TYPED_TEST_P(TransportSuite, WrongKeyIsRefused) {
  typename TestFixture::End stranger("another key");
  const auto in = connectNow(this->b, stranger);
  ASSERT_FALSE(in.ok());
  EXPECT_EQ(in.error().code, ErrorCode::kRefused) << in.error().message;
  const auto out = connectNow(stranger, this->b);
  ASSERT_FALSE(out.ok());
  EXPECT_EQ(out.error().code, ErrorCode::kRefused) << out.error().message;
  EXPECT_EQ(this->b.acceptedCount(), 1u);
}

TYPED_TEST_P(TransportSuite, WrongEngineIsRefused) {
  const auto result =
      connectNow(*this->a.transport, this->a.id(), this->b.transport->endpoint(), this->soon());
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code, ErrorCode::kRefused) << result.error().message;
}

TYPED_TEST_P(TransportSuite, GarbageEndpointsAreErrors) {
  const Bytes good = this->b.transport->endpoint();
  for (size_t bytes = 0; bytes < good.size(); ++bytes) {
    EXPECT_FALSE(
        connectNow(*this->a.transport, this->b.id(), ByteView(good).first(bytes), this->soon())
            .ok());
  }
  EXPECT_FALSE(connectNow(*this->a.transport, this->b.id(), pattern(1000, 1), this->soon()).ok());
}

TYPED_TEST_P(TransportSuite, ShutdownClosesWhatWasAccepted) {
  this->b.transport->shutdown();
  const Status how = this->a.endOf(this->b.id());
  EXPECT_TRUE(how.ok()) << how.error().message;
  EXPECT_FALSE(connectNow(this->a, this->b).ok());
}

TYPED_TEST_P(TransportSuite, AFencedPeerChangesNothingAndFetchesNothing) {
  auto atA = this->a.part(1 << 16), atB = this->b.part(1 << 16);
  expectPutArrives(*this->toB, atB, 1);
  expectPutArrives(*this->toA, atA, 1);
  this->toA->fence();
  this->toA->fence();

  // With shared memory the puts are refused at once; otherwise the other end drops them.
  (void)this->toB->put({atB.remote(), kData, pattern(100, 2), {kWord, stampOf(2)}});
  (void)this->toB->put({atB.remote(), kData, {}, {kWord, stampOf(3)}});
  Bytes user(10000), target(10000);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteRead);
  ASSERT_TRUE(region.ok());
  for (const RemoteRegion& remote : {atB.remote(), region->remote()}) {
    Completion completion(&this->bell);
    ASSERT_TRUE(this->toB->get({remote, 0, target, &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kAborted);
  }
  // Messages still go both ways. When they have arrived, the earlier puts have been handled.
  ASSERT_TRUE(this->toB->send(pattern(10, 1)).ok());
  EXPECT_EQ(this->b.messagesFrom(this->a.id(), 1), std::vector<Bytes>{pattern(10, 1)});
  ASSERT_TRUE(this->toA->send(pattern(10, 2)).ok());
  EXPECT_EQ(this->a.messagesFrom(this->b.id(), 1), std::vector<Bytes>{pattern(10, 2)});
  EXPECT_TRUE(this->stamped(atB, stampOf(1)));
  EXPECT_TRUE(atB.holds(kData, pattern(100, 1)));

  // The fenced peer's memory can still be read, if it is mapped here.
  if (!this->toA->peerArena().empty()) {
    Completion completion(&this->bell);
    ASSERT_TRUE(
        this->toA->get({atA.remote(), kData, std::span(target).first(100), &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kOk);
    EXPECT_TRUE(atA.holds(kData, ByteView(target).first(100)));
  }
  EXPECT_EQ(this->a.endedCount() + this->b.endedCount(), 0u) << "the connection stays";
}

// A fence stops transfers that are under way.
TYPED_TEST_P(TransportSuite, FencingStopsWhatIsUnderWay) {
  if (!this->toA->peerArena().empty())
    GTEST_SKIP() << "the peer stores by itself: a store that it is in the middle of may still come";
  constexpr size_t kBytes = 48 << 20;
  auto atB = this->b.part(kBytes + 4096);
  Bytes data = pattern(kBytes, 1), target(kBytes), user(kBytes);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteRead);
  ASSERT_TRUE(region.ok());
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toB->get({region->remote(), 0, target, &completion}).ok());
  ASSERT_TRUE(this->toB->put({atB.remote(), kData, data, {kWord, stampOf(1)}}).ok());
  ASSERT_TRUE(eventually([&] { return this->toA->lifeSigns() > (1 << 20); }));
  this->toA->fence();
  const uint64_t stamp = atB.word(kWord).load();
  const Bytes seen(atB.bytes().begin(), atB.bytes().end());
  ASSERT_TRUE(this->toB->send(pattern(10, 1)).ok());
  EXPECT_EQ(this->b.messagesFrom(this->a.id(), 1).size(), 1u);
  EXPECT_EQ(atB.word(kWord).load(), stamp);
  EXPECT_TRUE(atB.holds(0, seen));
  const ErrorCode end = endOf(completion);
  EXPECT_TRUE(end == ErrorCode::kOk || end == ErrorCode::kAborted) << errorCodeName(end);
}

// ---- writes

TYPED_TEST_P(TransportSuite, WriteOfAllSizes) {
  constexpr size_t kBytes = 20 << 20;
  auto part = this->b.part(kBytes);
  Bytes user(kBytes);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteWrite);
  ASSERT_TRUE(region.ok());
  uint64_t seed = 0;
  for (size_t bytes :
       {size_t(0), size_t(1), size_t(4097), size_t(100003), size_t(1 << 20) + 5, kBytes - 200}) {
    const Bytes data = pattern(bytes, ++seed);
    Completion completion(&this->bell);
    ASSERT_TRUE(this->toB->write({part.remote(), 128, data, &completion}).ok());
    ASSERT_TRUE(this->toB->write({region->remote(), 77, data, &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kOk) << bytes;
    EXPECT_TRUE(part.holds(128, data)) << bytes;
    EXPECT_TRUE(std::equal(data.begin(), data.end(), user.begin() + 77)) << bytes;
    EXPECT_TRUE(part.isZero(0, 128));
    EXPECT_TRUE(
        std::all_of(user.begin(), user.begin() + 77, [](auto b) { return b == std::byte{0}; }));
    EXPECT_EQ(user[77 + bytes], std::byte{0});
  }
}

TYPED_TEST_P(TransportSuite, WriteIsAnnouncedWhenItIsThere) {
  constexpr size_t kMost = 3 << 20;
  auto part = this->b.part(4096);
  Bytes lasting(kMost), there(kMost + 64);
  auto source = this->a.regions().add(lasting.data(), kMost, kRemoteRead | kLasting);
  auto target = this->b.regions().add(there.data(), there.size(), kRemoteWrite | kLasting);
  ASSERT_TRUE(source.ok() && target.ok());
  if (!this->toB->hasCards()) {
    Completion completion(&this->bell);
    const auto refused = this->toB->write({target->remote(), 0, lasting, &completion},
                                          {part.remote(), {kWord, stampOf(1)}});
    EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
    EXPECT_TRUE(completion.finished());
    return;
  }
  uint64_t number = 0;
  for (const size_t bytes : {size_t(0), size_t(1), size_t(4097), size_t(100003), kMost}) {
    // A transfer goes by packets; from long-lived memory by cards, from the second time on.
    for (const bool lasts : {false, true, true}) {
      const Bytes data = pattern(bytes, ++number);
      std::ranges::copy(data, lasting.begin());
      const ByteView from = lasts ? ByteView(lasting).first(bytes) : ByteView(data);
      Completion completion(&this->bell);
      ASSERT_TRUE(this->toB
                      ->write({target->remote(), 64, from, &completion},
                              {part.remote(), {kWord, stampOf(number)}})
                      .ok());
      ASSERT_TRUE(eventually([&] { return this->stamped(part, stampOf(number)); })) << bytes;
      EXPECT_TRUE(std::equal(data.begin(), data.end(), there.begin() + 64)) << bytes;
      EXPECT_EQ(endOf(completion), ErrorCode::kOk) << bytes;
    }
  }
  // A write that is refused is not announced.
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toB
                  ->write({target->remote(), there.size() - 1, lasting, &completion},
                          {part.remote(), {kWord + 8, stampOf(1)}})
                  .ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kRefused);
  expectPutArrives(*this->toB, part, number + 1);
  EXPECT_EQ(part.word(kWord + 8).load(), 0U);
  EXPECT_FALSE(this->toB
                   ->write({target->remote(), 0, lasting, &completion},
                           {part.remote(), {kWord + 1, stampOf(number + 3)}})
                   .ok());
}

TYPED_TEST_P(TransportSuite, ManyWritesAndGetsBothWaysAtOnce) {
  constexpr size_t kEach = 64, kBytes = 256 << 10, kAll = kEach * kBytes;
  Bytes atA(2 * kAll), atB(2 * kAll), fromA(kAll), fromB(kAll);
  const Bytes ofA = pattern(kAll, 1), ofB = pattern(kAll, 2);
  std::copy(ofA.begin(), ofA.end(), atA.begin());
  std::copy(ofB.begin(), ofB.end(), atB.begin());
  auto inA = this->a.regions().add(atA.data(), atA.size(), kRemoteRead | kRemoteWrite);
  auto inB = this->b.regions().add(atB.data(), atB.size(), kRemoteRead | kRemoteWrite);
  ASSERT_TRUE(inA.ok() && inB.ok());
  Completion completion(&this->bell);
  for (size_t at = 0; at < kAll; at += kBytes) {
    const std::span<std::byte> intoB(fromA.data() + at, kBytes), intoA(fromB.data() + at, kBytes);
    const ByteView a(ofA.data() + at, kBytes), b(ofB.data() + at, kBytes);
    ASSERT_TRUE(this->toB->get({inB->remote(), at, intoA, &completion}).ok());
    ASSERT_TRUE(this->toA->get({inA->remote(), at, intoB, &completion}).ok());
    ASSERT_TRUE(this->toB->write({inB->remote(), kAll + at, a, &completion}).ok());
    ASSERT_TRUE(this->toA->write({inA->remote(), kAll + at, b, &completion}).ok());
  }
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  EXPECT_TRUE(fromA == ofA && fromB == ofB);
  EXPECT_TRUE(std::equal(ofA.begin(), ofA.end(), atB.begin() + kAll));
  EXPECT_TRUE(std::equal(ofB.begin(), ofB.end(), atA.begin() + kAll));
}

TYPED_TEST_P(TransportSuite, ListsOfSmallTransfers) {
  constexpr size_t kEach = 3000, kBytes = 700;
  Bytes user(kEach * kBytes), back(kEach * kBytes);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteRead | kRemoteWrite);
  ASSERT_TRUE(region.ok());
  const Bytes data = pattern(kEach * kBytes, 5);
  Completion writes(&this->bell), gets(&this->bell);
  std::vector<WriteRequest> writing;
  std::vector<GetRequest> getting;
  for (size_t at = 0; at < data.size(); at += kBytes) {
    writing.push_back({region->remote(), at, ByteView(data).subspan(at, kBytes), &writes});
    getting.push_back({region->remote(), at, std::span(back).subspan(at, kBytes), &gets});
  }
  ASSERT_TRUE(this->toB->write(std::span<const WriteRequest>(writing)).ok());
  EXPECT_EQ(endOf(writes), ErrorCode::kOk);
  EXPECT_TRUE(user == data);
  ASSERT_TRUE(this->toB->get(std::span<const GetRequest>(getting)).ok());
  EXPECT_EQ(endOf(gets), ErrorCode::kOk);
  EXPECT_TRUE(back == data);
}

// Over days, a connection carries more transfers than any table of unfinished ones has room for.
TYPED_TEST_P(TransportSuite, TransfersWithoutEnd) {
  constexpr size_t kList = 4096, kLists = 9, kBytes = 8;
  Bytes user(kList * kBytes), back(kList * kBytes);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteRead | kRemoteWrite);
  ASSERT_TRUE(region.ok());
  for (size_t list = 0; list < kLists; ++list) {
    const Bytes data = pattern(kList * kBytes, list);
    Completion writes(&this->bell), gets(&this->bell);
    std::vector<WriteRequest> writing;
    std::vector<GetRequest> getting;
    for (size_t at = 0; at < data.size(); at += kBytes) {
      writing.push_back({region->remote(), at, ByteView(data).subspan(at, kBytes), &writes});
      getting.push_back({region->remote(), at, std::span(back).subspan(at, kBytes), &gets});
    }
    ASSERT_TRUE(this->toB->write(std::span<const WriteRequest>(writing)).ok());
    ASSERT_EQ(endOf(writes), ErrorCode::kOk) << list;
    ASSERT_TRUE(this->toB->get(std::span<const GetRequest>(getting)).ok());
    ASSERT_EQ(endOf(gets), ErrorCode::kOk) << list;
    EXPECT_TRUE(back == data);
  }
}

TYPED_TEST_P(TransportSuite, WriteOutsideFailsAndChangesNothing) {
  for (const size_t bytes : {size_t(100), size_t(1 << 20)}) {
    Bytes user(2 * bytes), readOnly(2 * bytes);
    auto part = this->b.part(2 * bytes + 4096, kRemoteWrite);
    auto region = this->b.regions().add(user.data(), user.size(), kRemoteWrite);
    auto unwritable = this->b.regions().add(readOnly.data(), readOnly.size(), kRemoteRead);
    ASSERT_TRUE(region.ok() && unwritable.ok());
    const Bytes data = pattern(bytes, 1);
    RemoteRegion unknown = region->remote(), longer = region->remote();
    unknown.key += 0x100000;
    longer.bytes += 4096;  // the initiator's idea of the length does not count
    const std::pair<RemoteRegion, uint64_t> wrong[] = {{region->remote(), bytes + 1},
                                                       {region->remote(), ~uint64_t(0) - 10},
                                                       {region->remote(), 2 * bytes + 1},
                                                       {longer, bytes + 1},
                                                       {part.remote(), bytes + 4097},
                                                       {unwritable->remote(), 0},
                                                       {unknown, 0}};
    for (const auto& [remote, offset] : wrong) {
      Completion completion(&this->bell);
      const Status begun = this->toB->write({remote, offset, data, &completion});
      const ErrorCode end = endOf(completion);
      EXPECT_EQ(begun.ok() ? end : begun.code(), ErrorCode::kRefused) << offset;
    }
    Completion completion(&this->bell);
    ASSERT_TRUE(this->toB->write({region->remote(), bytes, data, &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kOk);
    EXPECT_TRUE(std::equal(data.begin(), data.end(), user.begin() + bytes));
    const auto isZero = [](std::byte b) { return b == std::byte{0}; };
    EXPECT_TRUE(std::all_of(user.begin(), user.begin() + bytes, isZero));
    EXPECT_TRUE(std::ranges::all_of(readOnly, isZero));
    EXPECT_TRUE(part.isZero(0, 2 * bytes + 4096));
  }
}

TYPED_TEST_P(TransportSuite, WriteToARevokedRegionIsRefused) {
  Bytes user(1 << 20);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteWrite);
  ASSERT_TRUE(region.ok());
  const RemoteRegion remote = region->remote();
  *region = MemoryRegion();
  for (const size_t bytes : {size_t(100), user.size()}) {
    const Bytes data = pattern(bytes, 1);
    Completion completion(&this->bell);
    ASSERT_TRUE(this->toB->write({remote, 0, data, &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kRefused);
  }
  EXPECT_TRUE(std::ranges::all_of(user, [](std::byte b) { return b == std::byte{0}; }));
}

// A write that is under way: sevens, to memory of the owner that is not in its arena.
struct LongWrite {
  LongWrite(WireEnd& owner, Channel& channel, Doorbell& bell, size_t bytes)
      : user(bytes), data(bytes, std::byte{7}), completion(&bell) {
    auto added = owner.regions().add(user.data(), user.size(), kRemoteWrite);
    EXPECT_TRUE(added.ok());
    region = std::move(*added);
    EXPECT_TRUE(channel.write({region.remote(), 0, data, &completion}).ok());
  }
  Bytes user;
  const Bytes data;
  MemoryRegion region;
  Completion completion;
};

TYPED_TEST_P(TransportSuite, RegionsCanGoWhileTheyAreWritten) {
  LongWrite write(this->b, *this->toB, this->bell, 32 << 20);
  write.region = MemoryRegion();
  const Bytes seen = write.user;
  const ErrorCode end = endOf(write.completion);
  EXPECT_TRUE(end == ErrorCode::kOk || end == ErrorCode::kRefused) << errorCodeName(end);
  EXPECT_TRUE(write.user == seen) << "memory that was let go of is not written";
  EXPECT_EQ(end == ErrorCode::kOk, seen == write.data);
}

TYPED_TEST_P(TransportSuite, CancelEndsTheWritesOfOneCompletion) {
  constexpr size_t kWrites = 64, kBytes = 1 << 20;
  Bytes user(2 * kWrites * kBytes);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteWrite);
  ASSERT_TRUE(region.ok());
  Completion cancelled(&this->bell), other(&this->bell);
  auto source = std::make_unique<Bytes>(kWrites * kBytes, std::byte{7});
  const Bytes kept(kBytes, std::byte{9});
  for (size_t i = 0; i < kWrites; ++i) {
    const ByteView data = ByteView(*source).subspan(i * kBytes, kBytes);
    ASSERT_TRUE(this->toB->write({region->remote(), i * kBytes, data, &cancelled}).ok());
  }
  const size_t behind = kWrites * kBytes;
  ASSERT_TRUE(this->toB->write({region->remote(), behind, kept, &other}).ok());
  this->toB->cancel(&cancelled);
  ASSERT_TRUE(cancelled.finished());
  source.reset();  // a sanitizer finds code that still reads it
  EXPECT_EQ(endOf(other), ErrorCode::kOk);
  EXPECT_TRUE(std::equal(kept.begin(), kept.end(), user.begin() + behind));
}

TYPED_TEST_P(TransportSuite, CloseEndsWrites) {
  Bytes user(16 << 20);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteWrite);
  ASSERT_TRUE(region.ok());
  auto source = std::make_unique<Bytes>(user.size());
  Completion completion(&this->bell), late(&this->bell);
  ASSERT_TRUE(this->toB->write({region->remote(), 0, *source, &completion}).ok());
  this->toB->close();
  EXPECT_TRUE(completion.finished());
  EXPECT_FALSE(this->toB->write({region->remote(), 0, *source, &late}).ok());
  EXPECT_TRUE(late.finished());
  source.reset();  // a sanitizer finds code that still reads it
  // No goodbye is sent if it would come in the middle of a frame.
  EXPECT_NE(this->b.endOf(this->a.id()).code(), ErrorCode::kTimeout);
}

// The receiver closes its channel in the middle of the write.
TYPED_TEST_P(TransportSuite, WritesEndWhenThePeerCloses) {
  Bytes user(16 << 20);
  const Bytes data(user.size());
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteWrite);
  ASSERT_TRUE(region.ok());
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toB->write({region->remote(), 0, data, &completion}).ok());
  this->toA->close();
  const ErrorCode end = endOf(completion);
  EXPECT_TRUE(end == ErrorCode::kOk || end == ErrorCode::kPeerLost || end == ErrorCode::kAborted)
      << errorCodeName(end);
}

TYPED_TEST_P(TransportSuite, AFencedPeerWritesNothing) {
  Bytes user(1 << 20);
  auto part = this->b.part(1 << 20);
  auto region = this->b.regions().add(user.data(), user.size(), kRemoteWrite);
  ASSERT_TRUE(region.ok());
  this->toA->fence();
  for (const RemoteRegion& remote : {part.remote(), region->remote()}) {
    for (const size_t bytes : {size_t(100), user.size()}) {
      const Bytes data = pattern(bytes, 1);
      Completion completion(&this->bell);
      ASSERT_TRUE(this->toB->write({remote, 0, data, &completion}).ok());
      EXPECT_EQ(endOf(completion), ErrorCode::kAborted);
    }
  }
  EXPECT_TRUE(part.isZero(0, 1 << 20));
  EXPECT_TRUE(std::ranges::all_of(user, [](std::byte b) { return b == std::byte{0}; }));
  Completion ours(&this->bell);
  if (this->toA->peerArena().empty()) {
    auto atA = this->a.part(4096);
    EXPECT_EQ(this->toA->write({atA.remote(), 0, Bytes(10), &ours}).code(), ErrorCode::kAborted);
  }
}

TYPED_TEST_P(TransportSuite, FencingStopsWritesThatAreUnderWay) {
  LongWrite write(this->b, *this->toB, this->bell, 48 << 20);
  ASSERT_TRUE(eventually([&] { return peek(write.user.data()) == std::byte{7}; }));
  this->toA->fence();
  const Bytes seen = write.user;
  const ErrorCode end = endOf(write.completion);
  ASSERT_TRUE(this->toB->send(pattern(10, 1)).ok());
  EXPECT_EQ(this->b.messagesFrom(this->a.id(), 1).size(), 1u);
  EXPECT_TRUE(write.user == seen) << "no byte lands behind the fence";
  EXPECT_EQ(end, seen == write.data ? ErrorCode::kOk : ErrorCode::kAborted);
}

// While another thread fences or closes, the completion is destroyed right after cancel().
TYPED_TEST_P(TransportSuite, CancelBesideAnEndWaitsForTheEnd) {
  constexpr size_t kCount = 16, kEach = 1 << 20;
  for (const bool isFence : {true, false}) {
    typename TestFixture::End a;
    auto connected = connectNow(a, this->b);
    ASSERT_TRUE(connected.ok());
    const auto channel = std::move(*connected);
    Bytes target(kCount * kEach), source(kCount * kEach), user(2 * kCount * kEach);
    auto region = this->b.regions().add(user.data(), user.size(), kRemoteRead | kRemoteWrite);
    ASSERT_TRUE(region.ok());
    auto completion = std::make_unique<Completion>(&this->bell);
    std::atomic<bool> ends{false};
    std::thread ender([&] {
      EXPECT_TRUE(eventually([&] { return ends.load(); }));
      isFence ? channel->fence() : channel->close();
    });
    for (size_t i = 0; i < kCount; ++i) {
      const std::span into(target.data() + i * kEach, kEach),
          from(source.data() + i * kEach, kEach);
      (void)channel->get({region->remote(), i * kEach, into, completion.get()});
      (void)channel->write({region->remote(), (kCount + i) * kEach, from, completion.get()});
      if (i == kCount / 2) ends = true;
    }
    channel->cancel(completion.get());
    EXPECT_TRUE(completion->finished()) << completion->pending << " have not ended";
    completion.reset();
    std::ranges::fill(target, std::byte{1});
    ender.join();
    channel->close();
    EXPECT_TRUE(std::ranges::all_of(target, [](std::byte b) { return b == std::byte{1}; }));
  }
}

REGISTER_TYPED_TEST_SUITE_P(
    TransportSuite, WriteIsAnnouncedWhenItIsThere, PutsArriveBothWays, PutOfAllSizes,
    PutDataMayBeReusedAtOnce, PutToASealedWordWritesNothing, PutIsAnnouncedInAnotherRegion,
    PutWakesASleeper, PutRingsTheBellThatItsRegionNames, PutOutsideIsRefusedAndTheChannelLives,
    PutToARevokedRegionWritesNothing, PutsOfManyThreads, MessagesArriveInOrderAmongPutsAndGets,
    MessagesHaveASize, MessagesComeBeforeTheGoodbye, GetOfAllSizes, ManyGetsBothWaysAtOnce,
    PutsGoThroughWhileGetsAreUnderWay, GetOutsideFails, CancelEndsTheGetsOfOneCompletion,
    CloseEndsGetsAndSaysGoodbye, RegionsCanGoWhileTheyAreRead, WrongKeyIsRefused,
    WrongEngineIsRefused, GarbageEndpointsAreErrors, ShutdownClosesWhatWasAccepted,
    AFencedPeerChangesNothingAndFetchesNothing, FencingStopsWhatIsUnderWay, WriteOfAllSizes,
    ManyWritesAndGetsBothWaysAtOnce, ListsOfSmallTransfers, TransfersWithoutEnd,
    WriteOutsideFailsAndChangesNothing, WriteToARevokedRegionIsRefused,
    RegionsCanGoWhileTheyAreWritten, CancelEndsTheWritesOfOneCompletion, CloseEndsWrites,
    WritesEndWhenThePeerCloses, AFencedPeerWritesNothing, FencingStopsWritesThatAreUnderWay,
    CancelBesideAnEndWaitsForTheEnd);

}  // namespace mooncake::testing
