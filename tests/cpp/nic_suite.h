#pragma once

#include <algorithm>
#include <atomic>
#include <ctime>
#include <deque>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "wires/nic/nic.h"

// Tests that every network card must pass. A card's test file says
//
//   struct SimKind {
//     static Result<std::unique_ptr<Nic>> open();         // a fresh card
//     static constexpr bool kMovesBytes = true;           // a null card does not
//     static constexpr bool kChecksKeys = true;           // refuses wrong keys and ranges
//     static constexpr bool kNoticesTheGone = true;       // an operation to a closed card fails
//     static constexpr std::chrono::milliseconds kTimeout{500};  // the card's own limit
//   };
//   INSTANTIATE_TYPED_TEST_SUITE_P(Sim, NicSuite, SimKind);
//
// Two cards, a and b, live in this process; the test's own thread polls both.
namespace mooncake::testing {

inline constexpr std::chrono::seconds kNicPatience{20};

// A card and its completions.
struct NicEnd {
  std::unique_ptr<Nic> nic;
  std::deque<NicCompletion> done;

  void poll() {
    std::array<NicCompletion, 16> some;
    const size_t count = nic->poll(some);
    done.insert(done.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(count));
  }
};

// Memory that one card has registered.
struct NicBlock {
  NicBlock(Nic& nic, size_t bytes, uint32_t access = 0) : data(bytes) {
    auto made = nic.registerMemory(data, access);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    if (made.ok()) memory = std::move(*made);
  }
  NicBuffer at(size_t offset, size_t bytes) {
    return {std::span(data).subspan(offset, bytes), memory.get()};
  }
  NicBuffer all() { return at(0, data.size()); }
  void fill(uint64_t seed) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = byteAt(seed, i);
  }
  bool holds(uint64_t seed, size_t offset, size_t bytes, size_t from = 0) const {
    for (size_t i = 0; i < bytes; ++i) {
      if (data[offset + i] != byteAt(seed, from + i)) return false;
    }
    return true;
  }
  bool isZero(size_t offset, size_t bytes) const {
    return std::all_of(data.begin() + static_cast<ptrdiff_t>(offset),
                       data.begin() + static_cast<ptrdiff_t>(offset + bytes),
                       [](std::byte b) { return b == std::byte{0}; });
  }
  static std::byte byteAt(uint64_t seed, size_t i) {
    return static_cast<std::byte>((i * 131 + seed * 29 + 7) % 251 + 1);
  }

  Bytes data;
  std::unique_ptr<NicMemory> memory;
};

constexpr uint32_t kBothRights =
    static_cast<uint32_t>(NicAccess::kRemoteRead) | static_cast<uint32_t>(NicAccess::kRemoteWrite);

inline void* tagOf(uintptr_t number) { return reinterpret_cast<void*>(number); }

template <typename Kind>
class NicSuite : public ::testing::Test {
 protected:
  void SetUp() override {
    for (NicEnd* end : {&a, &b}) {
      auto opened = Kind::open();
      if (!opened.ok()) GTEST_SKIP() << opened.error().message;
      end->nic = std::move(*opened);
    }
    meet();
  }

  void meet() {
    auto peer = a.nic->insert(b.nic->address());
    ASSERT_TRUE(peer.ok()) << peer.error().message;
    toB = *peer;
    peer = b.nic->insert(a.nic->address());
    ASSERT_TRUE(peer.ok()) << peer.error().message;
    toA = *peer;
  }

  // Polls both cards until the condition holds.
  template <typename Condition>
  bool until(Condition holds, std::chrono::nanoseconds patience = kNicPatience) {
    const auto deadline = Deadline::after(patience);
    while (!holds()) {
      if (deadline.passed()) return false;
      const size_t before = a.done.size() + b.done.size();
      a.poll();
      if (b.nic) b.poll();
      if (a.done.size() + b.done.size() == before) std::this_thread::yield();
    }
    return true;
  }

  // Returns the next completion of one end.
  NicCompletion next(NicEnd& end) {
    if (!until([&] { return !end.done.empty(); })) {
      ADD_FAILURE() << "nothing has completed";
      return {.error = NicError::kDevice};
    }
    const NicCompletion first = end.done.front();
    end.done.pop_front();
    return first;
  }

  // Tries until the operation has begun: a full queue is no error.
  template <typename Begin>
  void begin(Begin attempt) {
    EXPECT_TRUE(until([&] {
      const Status status = attempt();
      EXPECT_TRUE(status.ok() || status.code() == ErrorCode::kExhausted) << status.error().message;
      return status.code() != ErrorCode::kExhausted;
    }));
  }

  void expectSendArrives(size_t bytes, uint64_t seed) {
    NicBlock source(*a.nic, bytes + 16), target(*b.nic, bytes + 16);
    source.fill(seed);
    begin([&] { return b.nic->receive(target.all(), tagOf(1)); });
    begin([&] { return a.nic->send(toB, source.at(0, 16), source.at(16, bytes), tagOf(2)); });
    const NicCompletion received = next(b);
    EXPECT_EQ(received.kind, NicCompletion::Kind::kReceived);
    EXPECT_EQ(received.error, NicError::kNone);
    EXPECT_EQ(received.context, tagOf(1));
    EXPECT_EQ(received.bytes, bytes + 16);
    const NicCompletion sent = next(a);
    EXPECT_EQ(sent.kind, NicCompletion::Kind::kSent);
    EXPECT_EQ(sent.error, NicError::kNone);
    EXPECT_EQ(sent.context, tagOf(2));
    if (Kind::kMovesBytes) {
      EXPECT_TRUE(target.holds(seed, 0, bytes + 16)) << bytes;
    }
  }

  void expectWriteArrives(uint64_t seed) {
    NicBlock source(*a.nic, 4096), target(*b.nic, 4096, kBothRights);
    source.fill(seed);
    begin([&] { return a.nic->write(toB, source.all(), target.memory->key(), 0, tagOf(3)); });
    const NicCompletion written = next(a);
    EXPECT_EQ(written.kind, NicCompletion::Kind::kWritten);
    EXPECT_EQ(written.error, NicError::kNone);
    if (Kind::kMovesBytes) {
      EXPECT_TRUE(target.holds(seed, 0, 4096));
    }
  }

  // Operations right behind a refused one may fail with it, on a card that closes the connection.
  void expectRecovers(uint64_t seed) {
    NicBlock source(*a.nic, 4096), target(*b.nic, 4096, kBothRights);
    source.fill(seed);
    EXPECT_TRUE(until([&] {
      begin([&] { return a.nic->write(toB, source.all(), target.memory->key(), 0, tagOf(3)); });
      return next(a).error == NicError::kNone;
    }));
    if (Kind::kMovesBytes) {
      EXPECT_TRUE(target.holds(seed, 0, 4096));
    }
    expectSendArrives(100, seed);
  }

  void expectWriteFails(NicBuffer source, NicKey key, uint64_t offset) {
    begin([&] { return a.nic->write(toB, source, key, offset, tagOf(9)); });
    const NicCompletion failed = next(a);
    EXPECT_EQ(failed.context, tagOf(9));
    EXPECT_TRUE(failed.error == NicError::kRefused || failed.error == NicError::kUnreachable);
  }

  NicEnd a, b;
  NicPeer toB = 0, toA = 0;
};

TYPED_TEST_SUITE_P(NicSuite);

TYPED_TEST_P(NicSuite, SaysWhatItIs) {
  EXPECT_FALSE(this->a.nic->name().empty());
  EXPECT_NE(std::string(this->a.nic->provider()), "");
  EXPECT_GT(this->a.nic->limits().sendDepth, 0u);
  EXPECT_GT(this->a.nic->limits().receiveDepth, 0u);
  EXPECT_GT(this->a.nic->limits().mostSendBytes, 0u);
  EXPECT_FALSE(this->a.nic->address().empty());
  EXPECT_LE(this->a.nic->address().size(), 256u);
  EXPECT_NE(this->a.nic->address(), this->b.nic->address());
}

TYPED_TEST_P(NicSuite, TheSameAddressIsTheSamePeer) {
  auto again = this->a.nic->insert(this->b.nic->address());
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, this->toB);
  auto self = this->a.nic->insert(this->a.nic->address());
  ASSERT_TRUE(self.ok());
  EXPECT_NE(*self, this->toB);
}

TYPED_TEST_P(NicSuite, NoAddressIsRefused) {
  EXPECT_FALSE(this->a.nic->insert({}).ok());
  Bytes tooLong(300, std::byte{1});
  EXPECT_FALSE(this->a.nic->insert(tooLong).ok());
}

TYPED_TEST_P(NicSuite, SendsOfAllSizes) {
  uint64_t seed = 0;
  for (const size_t bytes :
       {size_t(1), size_t(0), size_t(48), size_t(4096), size_t(65536), size_t(1) << 20}) {
    if (bytes + 16 > this->a.nic->limits().mostSendBytes) continue;
    this->expectSendArrives(bytes, ++seed);
  }
}

TYPED_TEST_P(NicSuite, SendsArriveOnceInAnyOrder) {
  constexpr size_t kBytes = 512;
  const size_t messages = std::min<size_t>(300, this->b.nic->limits().receiveDepth);
  NicBlock source(*this->a.nic, messages * kBytes), target(*this->b.nic, messages * kBytes);
  for (size_t i = 0; i < messages; ++i) {
    std::memcpy(&source.data[i * kBytes], &i, sizeof(i));
    this->begin([&] { return this->b.nic->receive(target.at(i * kBytes, kBytes), tagOf(i)); });
  }
  size_t sent = 0;
  std::set<size_t> arrived;
  for (size_t i = 0; i < messages; ++i) {
    this->begin([&] {
      return this->a.nic->send(this->toB, source.at(i * kBytes, 16),
                               source.at(i * kBytes + 16, kBytes - 16), tagOf(i));
    });
  }
  ASSERT_TRUE(this->until([&] {
    return this->a.done.size() >= messages && this->b.done.size() >= messages;
  })) << this->a.done.size()
      << " sent, " << this->b.done.size() << " received";
  for (const NicCompletion& one : this->a.done) sent += one.error == NicError::kNone;
  EXPECT_EQ(sent, messages);
  for (const NicCompletion& one : this->b.done) {
    EXPECT_EQ(one.error, NicError::kNone);
    size_t number = 0;
    std::memcpy(&number, &target.data[reinterpret_cast<uintptr_t>(one.context) * kBytes],
                sizeof(number));
    arrived.insert(number);
  }
  if (TypeParam::kMovesBytes) {
    EXPECT_EQ(arrived.size(), messages);
  }
}

TYPED_TEST_P(NicSuite, AWrittenOneIsInThePeersMemory) {
  if (!this->a.nic->limits().remoteWrite) GTEST_SKIP();
  for (const size_t bytes : {size_t(1), size_t(4096), size_t(65536), size_t(4) << 20}) {
    NicBlock source(*this->a.nic, bytes), target(*this->b.nic, bytes + 128, kBothRights);
    source.fill(bytes);
    this->begin([&] {
      return this->a.nic->write(this->toB, source.all(), target.memory->key(), 64, tagOf(5));
    });
    ASSERT_TRUE(this->until([&] { return !this->a.done.empty(); }));
    // The data must be there now, before b polls again.
    if (TypeParam::kMovesBytes) {
      EXPECT_TRUE(target.holds(bytes, 64, bytes)) << bytes;
    }
    EXPECT_EQ(this->a.done.front().error, NicError::kNone);
    EXPECT_EQ(this->a.done.front().kind, NicCompletion::Kind::kWritten);
    EXPECT_TRUE(target.isZero(0, 64) && target.isZero(64 + bytes, 64));
    this->a.done.clear();
  }
}

TYPED_TEST_P(NicSuite, ReadsBringThePeersMemory) {
  if (!this->a.nic->limits().remoteRead) GTEST_SKIP();
  for (const size_t bytes : {size_t(1), size_t(4096), size_t(65536), size_t(4) << 20}) {
    NicBlock target(*this->a.nic, bytes + 128), source(*this->b.nic, bytes + 64, kBothRights);
    source.fill(bytes);
    this->begin([&] {
      return this->a.nic->read(this->toB, target.at(64, bytes), source.memory->key(), 64, tagOf(6));
    });
    const NicCompletion read = this->next(this->a);
    EXPECT_EQ(read.error, NicError::kNone);
    EXPECT_EQ(read.kind, NicCompletion::Kind::kRead);
    if (TypeParam::kMovesBytes) {
      EXPECT_TRUE(target.holds(bytes, 64, bytes, 64)) << bytes;
    }
    EXPECT_TRUE(target.isZero(0, 64) && target.isZero(64 + bytes, 64));
  }
}

TYPED_TEST_P(NicSuite, AWrongKeyIsRefused) {
  if (!TypeParam::kChecksKeys) GTEST_SKIP();
  NicBlock source(*this->a.nic, 4096), target(*this->b.nic, 4096, kBothRights);
  source.fill(1);
  NicKey wrong = target.memory->key();
  wrong.key ^= 0x5a5a5a5a;
  this->expectWriteFails(source.all(), wrong, 0);
  EXPECT_TRUE(target.isZero(0, 4096));
  this->expectRecovers(2);
}

TYPED_TEST_P(NicSuite, OutsideOfTheRangeIsRefused) {
  if (!TypeParam::kChecksKeys) GTEST_SKIP();
  NicBlock source(*this->a.nic, 8192);
  source.fill(1);
  // The registered part has memory of ours on both sides.
  Bytes around(3 * 65536);
  auto middle = this->b.nic->registerMemory(std::span(around).subspan(65536, 65536), kBothRights);
  ASSERT_TRUE(middle.ok());
  for (const uint64_t offset : {uint64_t(65536 - 4096), uint64_t(65536), uint64_t(0) - 4096})
    this->expectWriteFails(source.all(), (*middle)->key(), offset);
  EXPECT_TRUE(std::all_of(around.begin(), around.begin() + 65536,
                          [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_TRUE(std::all_of(around.begin() + 2 * 65536, around.end(),
                          [](std::byte b) { return b == std::byte{0}; }));
  this->expectRecovers(2);
}

TYPED_TEST_P(NicSuite, AWithdrawnKeyIsRefused) {
  if (!TypeParam::kChecksKeys) GTEST_SKIP();
  NicBlock source(*this->a.nic, 4096), target(*this->b.nic, 4096, kBothRights);
  const NicKey key = target.memory->key();
  target.memory.reset();
  this->expectWriteFails(source.all(), key, 0);
  EXPECT_TRUE(target.isZero(0, 4096));
  this->expectRecovers(2);
}

TYPED_TEST_P(NicSuite, WithoutTheRightItIsRefused) {
  if (!TypeParam::kChecksKeys) GTEST_SKIP();
  NicBlock source(*this->a.nic, 4096);
  NicBlock readable(*this->b.nic, 4096, static_cast<uint32_t>(NicAccess::kRemoteRead));
  source.fill(1);
  this->expectWriteFails(source.all(), readable.memory->key(), 0);
  EXPECT_TRUE(readable.isZero(0, 4096));
  this->expectRecovers(2);
}

// No thread polls. So the queue fills and returns kExhausted, and each operation that it took ends
// once.
TYPED_TEST_P(NicSuite, AFullQueueSaysSo) {
  if (!this->a.nic->limits().remoteWrite) GTEST_SKIP();
  NicBlock source(*this->a.nic, 64), target(*this->b.nic, 64, kBothRights);
  for (int round = 0; round < 3; ++round) {
    size_t begun = 0;
    Status status;
    while ((status = this->a.nic->write(this->toB, source.all(), target.memory->key(), 0,
                                        tagOf(begun + 1)))
               .ok())
      ASSERT_LE(++begun, this->a.nic->limits().sendDepth);
    EXPECT_EQ(status.code(), ErrorCode::kExhausted);
    EXPECT_EQ(begun, this->a.nic->limits().sendDepth);
    ASSERT_TRUE(this->until([&] { return this->a.done.size() >= begun; }))
        << this->a.done.size() << " of " << begun;
    std::set<void*> ended;
    for (const NicCompletion& one : this->a.done) {
      EXPECT_EQ(one.error, NicError::kNone);
      EXPECT_TRUE(ended.insert(one.context).second);
    }
    this->a.done.clear();
  }
}

// Far more operations than the depth, from many threads at once. Upstream fails here with "timed
// out waiting for CQ drain".
TYPED_TEST_P(NicSuite, ManyThreadsTimesBatchAgainstTheDepth) {
  if (!this->a.nic->limits().remoteWrite) GTEST_SKIP();
  constexpr size_t kThreads = 8, kEach = 2000;
  NicBlock source(*this->a.nic, 256), target(*this->b.nic, 256, kBothRights);
  const NicKey key = target.memory->key();
  std::vector<std::atomic<int>> ends(kThreads * kEach);
  std::vector<std::thread> threads;
  std::atomic<bool> isLate{false};
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < kEach && !isLate;) {
        const Status status =
            i % 2 ? this->a.nic->write(this->toB, source.all(), key, 0, tagOf(t * kEach + i))
                  : this->a.nic->read(this->toB, source.all(), key, 0, tagOf(t * kEach + i));
        if (status.ok()) {
          ++i;
        } else {
          EXPECT_EQ(status.code(), ErrorCode::kExhausted);
          std::this_thread::yield();
        }
      }
    });
  }
  size_t all = 0;
  isLate = !this->until(
      [&] {
        for (const NicCompletion& one : this->a.done) {
          EXPECT_EQ(one.error, NicError::kNone);
          ++ends[reinterpret_cast<uintptr_t>(one.context)];
        }
        all += this->a.done.size();
        this->a.done.clear();
        return all >= kThreads * kEach;
      },
      std::chrono::seconds(60));
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(all, kThreads * kEach);
  for (const auto& end : ends) EXPECT_EQ(end, 1);
}

TYPED_TEST_P(NicSuite, CloseCancelsWhatIsUnderWay) {
  NicBlock target(*this->a.nic, 4096), source(*this->a.nic, 1 << 20);
  NicBlock remote(*this->b.nic, 1 << 20, kBothRights);
  std::set<void*> begun;
  for (uintptr_t i = 1; i <= 20; ++i) {
    if (this->a.nic->receive(target.all(), tagOf(i)).ok()) begun.insert(tagOf(i));
  }
  for (uintptr_t i = 101; i <= 120 && this->a.nic->limits().remoteWrite; ++i) {
    const NicKey key = remote.memory->key();
    if (this->a.nic->write(this->toB, source.all(), key, 0, tagOf(i)).ok()) begun.insert(tagOf(i));
  }
  this->a.nic->close();
  EXPECT_FALSE(this->a.nic->receive(target.all(), tagOf(1000)).ok());
  EXPECT_FALSE(this->a.nic->insert(this->b.nic->address()).ok());
  for (int i = 0; i < 20; ++i) this->a.poll();
  for (const NicCompletion& one : this->a.done) {
    EXPECT_TRUE(one.error == NicError::kCancelled ||
                (one.error == NicError::kNone && one.kind == NicCompletion::Kind::kWritten));
    EXPECT_EQ(begun.erase(one.context), 1u);
  }
  EXPECT_TRUE(begun.empty());
}

// The close comes at a random point of the write.
TYPED_TEST_P(NicSuite, CloseWhileAPeerWritesHere) {
  if (!TypeParam::kMovesBytes || !TypeParam::kNoticesTheGone || !this->a.nic->limits().remoteWrite)
    GTEST_SKIP();
  constexpr size_t kBytes = size_t(4) << 20;
  NicBlock source(*this->a.nic, kBytes);
  source.fill(1);
  for (int round = 0; round < 6; ++round) {
    NicBlock remote(*this->b.nic, kBytes, kBothRights);
    constexpr uintptr_t kWrites = 4;
    for (uintptr_t i = 1; i <= kWrites; ++i) {
      ASSERT_TRUE(
          this->a.nic->write(this->toB, source.all(), remote.memory->key(), 0, tagOf(i)).ok());
    }
    ASSERT_TRUE(this->until([&] {
      return this->a.done.size() == kWrites ||
             std::atomic_ref(remote.data[0]).load() != std::byte{0};
    }));
    this->b.nic->close();
    std::ranges::fill(remote.data, std::byte{0});
    ASSERT_TRUE(this->until([&] { return this->a.done.size() == kWrites; }));
    EXPECT_TRUE(remote.isZero(0, kBytes)) << round;
    this->a.done.clear();
    remote.memory.reset();
    auto opened = TypeParam::open();
    ASSERT_TRUE(opened.ok());
    this->b.nic = std::move(*opened);
    this->b.done.clear();
    this->meet();
  }
}

// The close comes at different points of the packets' way.
TYPED_TEST_P(NicSuite, CloseWhileLongPacketsAreUnderWay) {
  if (!TypeParam::kNoticesTheGone) GTEST_SKIP();
  constexpr uintptr_t kPackets = 64;
  const size_t bytes = static_cast<size_t>(
      std::min<uint64_t>(this->a.nic->limits().mostSendBytes, uint64_t(60) << 10));
  for (int round = 0; round < 40; ++round) {
    NicBlock source(*this->a.nic, bytes), inbox(*this->b.nic, kPackets * bytes);
    for (uintptr_t i = 0; i < kPackets; ++i)
      ASSERT_TRUE(this->b.nic->receive(inbox.at(i * bytes, bytes), tagOf(i)).ok());
    size_t begun = 0;
    for (uintptr_t i = 0; i < kPackets; ++i)
      begun += this->a.nic->send(this->toB, source.all(), {}, tagOf(i)).ok();
    EXPECT_GT(begun, 0u);
    // Polls until the first packet is there, because the cards connect first, and then a few times
    // more.
    ASSERT_TRUE(this->until([&] { return !this->b.done.empty() || !this->a.done.empty(); }));
    for (int i = 0; i < round % 8; ++i) (i % 3 == 0 ? this->a : this->b).poll();
    this->b.nic->close();
    ASSERT_TRUE(this->until([&] { return this->a.done.size() == begun; }));
    this->a.done.clear();
    inbox.memory.reset();
    auto opened = TypeParam::open();
    ASSERT_TRUE(opened.ok());
    this->b.nic = std::move(*opened);
    this->b.done.clear();
    this->meet();
  }
}

TYPED_TEST_P(NicSuite, AnOperationToWhoIsGoneFailsInTime) {
  if (!TypeParam::kNoticesTheGone) GTEST_SKIP();
  NicBlock source(*this->a.nic, 4096);
  auto target = std::make_unique<NicBlock>(*this->b.nic, 4096, kBothRights);
  this->expectWriteArrives(1);
  const NicKey key = target->memory->key();
  this->b.nic->close();
  this->b.nic.reset();
  target.reset();
  for (uintptr_t i = 1; i <= 3; ++i) {
    const auto began = Clock::now();
    ASSERT_TRUE(this->a.nic->write(this->toB, source.all(), key, 0, tagOf(i)).ok());
    const NicCompletion failed = this->next(this->a);
    EXPECT_EQ(failed.context, tagOf(i));
    EXPECT_EQ(failed.error, NicError::kUnreachable);
    EXPECT_LT(Clock::now() - began, TypeParam::kTimeout * 4 + std::chrono::seconds(2));
  }
  // Operations to other peers work as before.
  auto opened = TypeParam::open();
  ASSERT_TRUE(opened.ok());
  this->b.nic = std::move(*opened);
  this->b.done.clear();
  this->meet();
  this->expectWriteArrives(2);
  this->expectSendArrives(1000, 3);
}

TYPED_TEST_P(NicSuite, ARemovedPeerIsNobodyAnyMore) {
  NicBlock source(*this->a.nic, 4096);
  this->expectSendArrives(100, 1);
  this->a.nic->remove(this->toB);
  this->a.nic->remove(this->toB);
  const Status status = this->a.nic->send(this->toB, source.all(), {}, tagOf(1));
  EXPECT_EQ(status.code(), ErrorCode::kPeerLost);
  const NicPeer before = this->toB;
  this->meet();
  EXPECT_NE(this->toB, before);
  this->expectSendArrives(100, 2);
}

// Operations that are under way to the peer end, well or cancelled.
TYPED_TEST_P(NicSuite, RemovalWithOperationsUnderWay) {
  if (!this->a.nic->limits().remoteWrite) GTEST_SKIP();
  NicBlock source(*this->a.nic, 1 << 20), target(*this->b.nic, 1 << 20, kBothRights);
  size_t begun = 0;
  while (
      begun < 64 &&
      this->a.nic->write(this->toB, source.all(), target.memory->key(), 0, tagOf(begun + 1)).ok())
    ++begun;
  this->a.nic->remove(this->toB);
  ASSERT_TRUE(this->until([&] { return this->a.done.size() >= begun; }))
      << this->a.done.size() << " of " << begun;
  EXPECT_EQ(this->a.done.size(), begun);
  for (const NicCompletion& one : this->a.done)
    EXPECT_TRUE(one.error == NicError::kNone || one.error == NicError::kCancelled);
  this->a.done.clear();
  this->meet();
  this->expectSendArrives(100, 2);
}

TYPED_TEST_P(NicSuite, WaitEndsAtADeadlineAtAWakeAndAtACompletion) {
  NicBlock source(*this->a.nic, 64), target(*this->b.nic, 64);
  this->expectSendArrives(100, 1);
  const auto waited = [&](Nic& nic, std::chrono::milliseconds most) {
    const auto began = Clock::now();
    const auto deadline = Deadline::after(most);
    std::array<NicCompletion, 4> some;
    size_t found = 0;
    while ((found = nic.poll(some)) == 0 && !deadline.passed()) nic.wait(deadline);
    return std::pair(found, Clock::now() - began);
  };
  const auto [nothing, took] = waited(*this->b.nic, std::chrono::milliseconds(30));
  EXPECT_EQ(nothing, 0u);
  EXPECT_GE(took, std::chrono::milliseconds(30));

  this->begin([&] { return this->b.nic->receive(target.all(), tagOf(1)); });
  std::pair<size_t, Clock::duration> result;
  std::thread sleeper([&] { result = waited(*this->b.nic, std::chrono::seconds(10)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  this->begin([&] { return this->a.nic->send(this->toB, source.all(), {}, tagOf(2)); });
  const auto patience = Deadline::after(std::chrono::seconds(10));
  while (this->a.done.empty() && !patience.passed()) this->a.poll();
  EXPECT_FALSE(this->a.done.empty());
  sleeper.join();
  EXPECT_EQ(result.first, 1u);
  EXPECT_LT(result.second, std::chrono::seconds(9));

  std::atomic<bool> isAwake{false};
  std::thread woken([&] {
    // The wait of cards without a descriptor returns earlier.
    const auto deadline = Deadline::after(std::chrono::seconds(10));
    while (!isAwake && !deadline.passed()) this->b.nic->wait(deadline);
    EXPECT_FALSE(deadline.passed());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  isAwake = true;
  this->b.nic->wake();
  woken.join();
}

inline std::chrono::nanoseconds threadCpuTime() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

TYPED_TEST_P(NicSuite, NoProcessorIsBusyWhenNothingMoves) {
  this->expectSendArrives(100, 1);
  NicBlock target(*this->b.nic, 64);
  this->begin([&] { return this->b.nic->receive(target.all(), tagOf(1)); });
  const auto before = threadCpuTime();
  const auto deadline = Deadline::after(std::chrono::milliseconds(300));
  std::array<NicCompletion, 4> some;
  while (!deadline.passed()) {
    EXPECT_EQ(this->b.nic->poll(some), 0u);
    this->b.nic->wait(deadline);
  }
  EXPECT_LT(threadCpuTime() - before, std::chrono::milliseconds(60));
}

REGISTER_TYPED_TEST_SUITE_P(
    NicSuite, SaysWhatItIs, TheSameAddressIsTheSamePeer, NoAddressIsRefused, SendsOfAllSizes,
    SendsArriveOnceInAnyOrder, AWrittenOneIsInThePeersMemory, ReadsBringThePeersMemory,
    AWrongKeyIsRefused, OutsideOfTheRangeIsRefused, AWithdrawnKeyIsRefused,
    WithoutTheRightItIsRefused, AFullQueueSaysSo, ManyThreadsTimesBatchAgainstTheDepth,
    CloseCancelsWhatIsUnderWay, CloseWhileAPeerWritesHere, CloseWhileLongPacketsAreUnderWay,
    AnOperationToWhoIsGoneFailsInTime, ARemovedPeerIsNobodyAnyMore, RemovalWithOperationsUnderWay,
    WaitEndsAtADeadlineAtAWakeAndAtACompletion, NoProcessorIsBusyWhenNothingMoves);

}  // namespace mooncake::testing
