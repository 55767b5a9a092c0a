// Connections break under a healthy job: they are made again, no data is lost, and no rank is
// accused (docs/connections.md, "When a connection breaks").
#include <atomic>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <latch>
#include <random>

#include "base/failpoint.h"
#include "collectives/collectives.h"
#include "collectives/point_to_point.h"
#include "collectives/rma_window.h"
#include "engine/engine.h"
#include "ranks_in_threads.h"
#include "socket_breaker.h"
#include "wire_end.h"
#include "wires/sim/sim_transport.h"
#include "wires/tcp/tcp_transport.h"

namespace mooncake::test {
namespace {

using namespace std::chrono_literals;
using mooncake::testing::endOf;
using mooncake::testing::eventually;
using mooncake::testing::onLoopback;
using mooncake::testing::Part;
using mooncake::testing::pattern;
using mooncake::testing::stampOf;
using mooncake::testing::WireEnd;
using How = SocketBreaker::How;

// ---- one channel, reconnected by hand

class TcpRenewal : public mooncake::testing::ConnectedTest {
 protected:
  void SetUp() override { connect(a, b); }
  Status reconnect() { return ConnectedTest::reconnect(a, b); }
  static void expectPut(Channel& channel, const Part& part, uint64_t number) {
    expectPutArrives(channel, part, number, 5000);
  }

  WireEnd a{onLoopback(), TcpTransport::create}, b{onLoopback(), TcpTransport::create};
};

TEST_F(TcpRenewal, TheSameChannelGoesOn) {
  auto atA = a.part(1 << 22), atB = b.part(1 << 22);
  const Bytes data = pattern(1 << 22, 1);
  std::copy(data.begin() + (1 << 20), data.end(), atB.bytes().begin() + (1 << 20));
  for (uint64_t round = 1; round <= 20; ++round) {
    const auto how = round % 2 ? How::kReset : How::kHangUp;
    ASSERT_GT(SocketBreaker::breakAll(how), 0u);
    ASSERT_TRUE(eventually([&] { return a.endedCount() == round; }));
    Bytes target(100);
    Completion refused(&bell);
    const PutRequest put{atB.remote(), 128, {}, {64, stampOf(1000)}};
    EXPECT_EQ(toB->put(put).code(), ErrorCode::kPeerLost);
    EXPECT_EQ(toB->get({atB.remote(), 0, target, &refused}).code(), ErrorCode::kPeerLost);
    ASSERT_TRUE(reconnect().ok());
    ASSERT_TRUE(eventually([&] { return b.renewedCount() == round; }));
    expectPut(*toB, atB, round);
    expectPut(*toA, atA, round);
    Completion completion(&bell);
    Bytes large(3 << 20);
    ASSERT_TRUE(toB->get({atB.remote(), 1 << 20, large, &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kOk);
    EXPECT_TRUE(std::equal(large.begin(), large.end(), data.begin() + (1 << 20)));
    const Bytes message = pattern(200, round);
    ASSERT_TRUE(toA->send(message).ok());
    EXPECT_EQ(a.messagesFrom(b.id(), round).back(), message);
  }
  EXPECT_EQ(b.acceptedCount(), 1u);
}

std::atomic<size_t> lanesAdded{0};

// The other lanes close with it, at both ends, and are opened again at need.
TEST_F(TcpRenewal, OneBrokenLaneIsEnough) {
  constexpr size_t kLarge = 1 << 18, kEnds = 6, kDataEnds = 4;
  lanesAdded = 0;
  observeFailpoints(
      [](const char* name) { lanesAdded += std::string_view(name) == "lane-stands"; });
  auto atB = b.part(kLarge), atA = a.part(kLarge);
  const auto fetch = [&](Channel& from, const Part& part) {
    Bytes target(kLarge);
    Completion completion(&bell);
    EXPECT_TRUE(from.get({part.remote(), 0, target, &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  };
  for (uint64_t round = 1; round <= kEnds; ++round) {
    // A lane that breaks while it is being made is no broken lane.
    ASSERT_TRUE(eventually([&] {
      round % 2 ? fetch(*toB, atB) : fetch(*toA, atA);
      return lanesAdded == round * kDataEnds;
    }));
    ASSERT_EQ(SocketBreaker::connections().size(), kEnds);
    SocketBreaker::breakOne(SocketBreaker::connections()[round - 1], How::kReset);
    ASSERT_TRUE(eventually([&] { return a.endedCount() == round; }));
    ASSERT_TRUE(reconnect().ok());
    ASSERT_TRUE(eventually([&] { return b.renewedCount() == round; }));
    EXPECT_EQ(SocketBreaker::connections().size(), 2u);
    expectPut(*toB, atB, round);
    expectPut(*toA, atA, round);
  }
}

// A break at one end only: the other end learns of it by the new call.
TEST_F(TcpRenewal, OverAConnectionThatStillStands) {
  auto atA = a.part(1 << 16), atB = b.part(1 << 16);
  for (uint64_t round = 1; round <= 10; ++round) {
    ASSERT_TRUE(reconnect().ok());
    ASSERT_TRUE(eventually([&] { return b.renewedCount() == round; }));
    expectPut(*toB, atB, round);
    expectPut(*toA, atA, round);
  }
  EXPECT_EQ(a.endedCount() + b.endedCount(), 0u);
}

TEST_F(TcpRenewal, AFenceStays) {
  auto atB = b.part(1 << 16), atA = a.part(1 << 16);
  toA->fence();
  SocketBreaker::breakAll(How::kReset);
  ASSERT_TRUE(eventually([&] { return a.endedCount() == 1; }));
  ASSERT_TRUE(reconnect().ok());
  ASSERT_TRUE(toB->put({atB.remote(), 128, pattern(100, 1), {64, stampOf(1)}}).ok());
  ASSERT_TRUE(toB->send(pattern(10, 1)).ok());
  EXPECT_EQ(b.messagesFrom(a.id(), 1).size(), 1u);
  EXPECT_EQ(atB.word(64).load(), 0u);
  Bytes target(100);
  Completion completion(&bell), ours(&bell);
  ASSERT_TRUE(toB->get({atB.remote(), 0, target, &completion}).ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kAborted);
  EXPECT_EQ(toA->get({atA.remote(), 0, target, &ours}).code(), ErrorCode::kAborted);
}

TEST_F(TcpRenewal, NotOfAClosedChannel) {
  auto atB = b.part(1 << 16);
  toB->close();
  EXPECT_EQ(reconnect().code(), ErrorCode::kAborted);
  EXPECT_EQ(toB->put({atB.remote(), 128, {}, {64, stampOf(1)}}).code(), ErrorCode::kAborted);
  EXPECT_EQ(b.renewedCount(), 0u);
}

TEST_F(TcpRenewal, UnderPutsAndGetsOfManyThreads) {
  constexpr size_t kBytes = 3 << 20;
  auto atB = b.part(kBytes + 4096), atA = a.part(kBytes + 4096);
  const Bytes data = pattern(kBytes, 5);
  std::copy(data.begin(), data.end(), atB.bytes().begin() + 4096);
  std::atomic<bool> stops{false};
  std::atomic<size_t> fetched{0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (uint64_t n = 1; !stops; ++n) {
      const Bytes piece = pattern(100000, n);
      (void)toB->put({atB.remote(), 128, {}, {64, stampOf(n)}});
      (void)toA->put({atA.remote(), 4096, piece, {64, stampOf(n)}});
      (void)toA->send(pattern(100, n));
    }
  });
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      Bytes target(kBytes);
      while (!stops) {
        Completion completion(&bell);
        std::fill(target.begin(), target.end(), std::byte{});
        if (toB->get({atB.remote(), 4096, target, &completion}).ok() &&
            endOf(completion) == ErrorCode::kOk) {
          EXPECT_EQ(target, data);
          ++fetched;
        }
        toB->cancel(&completion);
      }
    });
  }
  for (uint64_t round = 1; round <= 50; ++round) {
    const size_t before = fetched;  // another fetch is under way by now
    ASSERT_TRUE(eventually([&] { return fetched > before; }));
    const size_t ended = a.endedCount();
    SocketBreaker::breakAll(round % 2 ? How::kReset : How::kHangUp);
    ASSERT_TRUE(eventually([&] { return a.endedCount() > ended; }));
    ASSERT_TRUE(reconnect().ok());
  }
  const size_t before = fetched;
  EXPECT_TRUE(eventually([&] { return fetched > before + 1; }));
  stops = true;
  for (auto& thread : threads) thread.join();
}

// ---- engines do it by themselves

struct Pair {
  explicit Pair(const char* transport = "tcp", std::chrono::milliseconds failureTimeout = 20s) {
    std::vector<Bytes> endpoints;
    for (int i = 0; i < 2; ++i) {
      defaultSimOptions().made = cards[i];
      auto& engine = engines[i];
      EngineOptions options{.logName = "engine", .arenaBytes = size_t(1) << 30};
      options.env.transports = {transport};
      options.env.hostIp = "127.0.0.1";
      options.env.failureTimeout = failureTimeout;
      options.jobKey = Bytes(32, std::byte{7});
      auto made = Engine::create(std::move(options));
      EXPECT_TRUE(made.ok());
      engine = *made;
      endpoints.push_back(engine->endpoint());
    }
    auto other = std::async(std::launch::async,
                            [&] { return engines[1]->connect(endpoints, Deadline::after(30s)); });
    auto mine = engines[0]->connect(endpoints, Deadline::after(30s));
    auto theirs = other.get();
    EXPECT_TRUE(mine.ok() && theirs.ok());
    peers[0] = (*mine)[1];
    peers[1] = (*theirs)[0];
    for (int i = 0; i < 2; ++i) {
      engines[i]->observe([this](const auto&, const Evidence&) { ++evidence; },
                          [this, i](const EngineId&) { ++reconnected[i]; });
    }
  }
  ~Pair() {
    for (auto& engine : engines) engine->observe(nullptr);
    defaultSimOptions() = {};
  }
  std::shared_ptr<SimCards> cards[2] = {std::make_shared<SimCards>(), std::make_shared<SimCards>()};
  std::shared_ptr<Engine> engines[2];
  std::shared_ptr<Peer> peers[2];
  std::atomic<int> evidence{0};
  std::atomic<uint64_t> reconnected[2] = {0, 0};
};

TEST(EngineReconnects, BothEndsAreToldAndNobodyIsAccused) {
  Pair pair;
  constexpr uint64_t kDoor = 7;
  std::atomic<uint64_t> last[2] = {0, 0};
  for (int i = 0; i < 2; ++i) {
    pair.engines[i]->openTopic(kDoor, [&last, i](const EngineId&, ByteView message) {
      const uint64_t number = ByteReader(message).get<uint64_t>();
      EXPECT_GT(number, last[i]);
      last[i] = number;
    });
  }
  for (uint64_t round = 1; round <= 30; ++round) {
    const uint64_t before[2] = {pair.reconnected[0], pair.reconnected[1]};
    const auto all = SocketBreaker::connections();
    SocketBreaker::breakOne(all[round % all.size()], round % 3 ? How::kReset : How::kHangUp);
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(eventually([&] { return pair.reconnected[i] > before[i]; })) << round;
    }
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(
          pair.engines[i]->send(*pair.peers[i], kDoor, ByteWriter().put(round).take()).ok());
      ASSERT_TRUE(eventually([&] { return last[1 - i] == round; })) << round;
    }
  }
  EXPECT_EQ(pair.evidence, 0);
  EXPECT_FALSE(pair.peers[0]->disconnected || pair.peers[1]->disconnected);
}

// The goodbye takes the new connection, so a rank that leaves does not count as dead.
TEST(EngineReconnects, BeforeItLeaves) {
  for (int round = 0; round < 10; ++round) {
    Pair pair;
    const int who = round % 2;
    SocketBreaker::breakAll(How::kReset);
    ASSERT_TRUE(eventually([&] { return pair.reconnected[0] > 0 && pair.reconnected[1] > 0; }));
    const uint64_t before = pair.reconnected[who];
    SocketBreaker::breakAll(How::kReset);
    ASSERT_TRUE(eventually([&] {  // it has noticed
      const auto seen = pair.peers[who]->channel->put({{0, 64, 1}, 0, {}, {64, 1}}).code();
      return seen == ErrorCode::kPeerLost || pair.reconnected[who] > before;
    }));
    pair.engines[who]->leave();
    ASSERT_TRUE(eventually([&] { return pair.peers[1 - who]->disconnected.load(); }));
    EXPECT_TRUE(pair.peers[1 - who]->evidence.isGoodbye()) << pair.peers[1 - who]->evidence.detail;
  }
}

// Otherwise a peer that is alive counts it as a rank that has left, and may go on without it.
TEST(EngineReconnects, ItSaysNoGoodbyeToAPeerThatItGivesUp) {
  for (const int who : {0, 1}) {
    defaultSimOptions() = {.cards = 1,
                           .odds = {.failed = 0, .late = 0, .lost = 0, .storm = 0, .death = 0},
                           .breakOdds = 0,
                           .channel = {.stallLimit = 20ms, .pathLimit = 50ms}};
    Pair pair("sim", 300ms);
    pair.cards[who]->kill(0);  // TCP goes on
    ASSERT_TRUE(pair.peers[who]->channel->put({{0, 64, 1}, 0, {}, {64, 1}}).ok());
    for (const auto& peer : pair.peers) {
      ASSERT_TRUE(eventually([&] { return peer->disconnected.load(); }));
      EXPECT_FALSE(peer->evidence.isGoodbye()) << peer->evidence.detail;
    }
  }
}

// ---- groups

Ranks overTcp(int size) {
  return {.size = size, .transports = {"tcp"}, .eagerBytes = 8 << 10, .failureTimeout = 20s};
}

template <typename T>
std::span<std::byte> bytesOf(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

void expectPeace(const Group& group) {
  EXPECT_EQ(group.membership()->view().epoch, 1u);
  EXPECT_TRUE(group.membership()->accusations().empty());
  EXPECT_TRUE(group.usable().ok());
}

// All ranks do the same operations, and each checks every result.
void operate(Group& group, uint64_t seed, int count) {
  constexpr Reduction kSum{DType::kFloat32, ReduceKind::kSum};
  const auto size = size_t(group.size());
  const auto inputOf = [&](int rank, size_t n, int op) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; ++i)
      values[i] = float((i * 7 + size_t(rank) * 13 + size_t(op)) % 101);
    return values;
  };
  const auto sumOf = [&](size_t n, int op) {
    std::vector<float> sum(n);
    for (int r = 0; r < group.size(); ++r) {
      const auto input = inputOf(r, n, op);
      for (size_t i = 0; i < n; ++i) sum[i] += input[i];
    }
    return sum;
  };
  std::mt19937_64 random(seed);
  for (int op = 0; op < count; ++op) {
    const size_t n = random() % 3 == 0 ? 20000 + random() % 100000 : 1 + random() % 2000;
    const uint64_t verb = random() % 6;
    const int root = int(random() % size);
    Status status;
    bool isRight = true;
    std::vector<float> data = inputOf(group.rank(), n, op);
    if (verb == 0) {
      status = barrier(group, soon());
    } else if (verb == 1) {
      status = broadcast(group, bytesOf(data), DType::kFloat32, root, soon());
      isRight = data == inputOf(root, n, op);
    } else if (verb == 2) {
      std::vector<std::vector<float>> parts(size, std::vector<float>(n));
      std::vector<std::span<std::byte>> outputs;
      for (auto& part : parts) outputs.push_back(bytesOf(part));
      status = allgather(group, bytesOf(data), outputs, DType::kFloat32, soon());
      for (size_t r = 0; r < size; ++r) isRight = isRight && parts[r] == inputOf(int(r), n, op);
    } else if (verb == 3) {
      const size_t share = (n + size - 1) / size;
      data = inputOf(group.rank(), share * size, op);
      std::vector<float> mine(share);
      status = reduceScatter(group, bytesOf(data), bytesOf(mine), kSum, soon());
      const auto sum = sumOf(share * size, op);
      isRight = std::equal(mine.begin(), mine.end(), sum.begin() + ptrdiff_t(group.rank() * share));
    } else {
      status = allreduce(group, bytesOf(data), kSum, soon());
      isRight = data == sumOf(n, op);
    }
    ASSERT_TRUE(status.ok()) << op << " " << verb << ": " << status.error().message;
    ASSERT_TRUE(isRight) << "operation " << op << ", verb " << verb << ", " << n << " values";
  }
}

class GroupReconnects : public ::testing::TestWithParam<uint64_t> {};

TEST_P(GroupReconnects, EveryResultIsExact) {
  std::latch ready(3), done(3);
  std::unique_ptr<Troublemaker> trouble;
  runRanks(overTcp(3), [&](Group& group) {
    ready.arrive_and_wait();
    if (group.rank() == 0) trouble = std::make_unique<Troublemaker>(GetParam(), 1ms, 8ms);
    operate(group, GetParam(), 200);
    done.arrive_and_wait();
    if (group.rank() == 0) {
      trouble->stop();
      RecordProperty("broken", int(trouble->broken()));
      EXPECT_GT(trouble->broken(), 0u);
    }
    expectPeace(group);
    operate(group, GetParam() + 1, 5);
  });
}

// Breaks begin before the first rank connects. They come at random times, so many jobs are needed
// to hit the critical moments.
TEST_P(GroupReconnects, ItsStartAsWell) {
  for (int job = 0; job < 10; ++job) {
    SCOPED_TRACE(job);
    std::atomic<bool> stops{false};
    std::thread trouble([&, random = std::mt19937_64(GetParam() * 100 + uint64_t(job))]() mutable {
      for (int broken = 0; broken < 6 && !stops;) {
        const auto all = SocketBreaker::connections();
        if (all.empty()) continue;
        SocketBreaker::breakOne(all[random() % all.size()], How::kReset);
        ++broken;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      }
    });
    std::latch operated(3), looked(3);
    runRanks(overTcp(3), [&](Group& group) {
      operate(group, GetParam(), 3);
      operated.arrive_and_wait();
      expectPeace(group);
      looked.arrive_and_wait();  // no rank leaves before
    });
    stops = true;
    trouble.join();
  }
}

// Sends large and small messages both ways between all ranks. They arrive in the order of sends.
void exchange(Group& group, PointToPoint& messages, int count) {
  const auto contentOf = [](int from, int to, int number) {
    const size_t bytes = number % 5 == 0 ? 9000 + size_t(number) * 50 : 8 + size_t(number) % 800;
    return pattern(bytes, uint64_t(from * 7 + to) * 1000 + uint64_t(number));
  };
  std::vector<std::thread> threads;
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank()) continue;
    threads.emplace_back([&, peer] {
      for (int n = 0; n < count; ++n) {
        const Bytes data = contentOf(group.rank(), peer, n);
        const auto message = messages.send(data, peer, 1, soon());
        ASSERT_TRUE(messages.wait(*message, soon()));
        ASSERT_TRUE(message->status().ok()) << message->status().error().message;
      }
    });
    threads.emplace_back([&, peer] {
      for (int n = 0; n < count; ++n) {
        const Bytes expected = contentOf(peer, group.rank(), n);
        Bytes data(expected.size());
        const auto message = messages.receive(data, peer, 1, soon());
        ASSERT_TRUE(messages.wait(*message, soon()));
        ASSERT_TRUE(message->status().ok()) << n << ": " << message->status().error().message;
        ASSERT_EQ(data, expected) << n;
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Checks that none of three ranks has a message left after an exchange.
void expectNoneLeft(Group& group, PointToPoint& messages) {
  Bytes one(1);
  const int next = (group.rank() + 1) % 3, before = (group.rank() + 2) % 3;
  const auto sent = messages.send(one, next, 1, soon());
  const auto received = messages.receive(one, before, 1, soon());
  EXPECT_TRUE(messages.wait(*received, soon()) && received->status().ok());
  EXPECT_TRUE(messages.wait(*sent, soon()));
}

TEST_P(GroupReconnects, EveryMessageComesOnce) {
  std::latch ready(3), done(3);
  std::unique_ptr<Troublemaker> trouble;
  runRanks(overTcp(3), [&](Group& group) {
    PointToPoint messages(group);
    ready.arrive_and_wait();
    if (group.rank() == 0) trouble = std::make_unique<Troublemaker>(GetParam(), 1ms, 8ms);
    exchange(group, messages, 400);
    done.arrive_and_wait();
    if (group.rank() == 0) {
      trouble->stop();
      EXPECT_GT(trouble->broken(), 0u);
    }
    expectPeace(group);
    expectNoneLeft(group, messages);
    ASSERT_TRUE(barrier(group, soon()).ok());
    messages.abort({ErrorCode::kAborted, "the end"});
  });
}

// Puts of all sizes and signals between all ranks. A rank that has a signal has the puts before it.
TEST_P(GroupReconnects, EveryPutIsThereWithItsSignal) {
  std::latch ready(3), done(3);
  std::unique_ptr<Troublemaker> trouble;
  runRanks(overTcp(3), [&](Group& group) {
    PointToPoint messages(group);
    constexpr size_t kRoom = 60000;
    Bytes memory(3 * kRoom);
    auto window = RmaWindow::open(group, messages, {memory, {3 * kRoom}}, DType::kUInt8, soon());
    ASSERT_TRUE(window.ok());
    const int next = (group.rank() + 1) % 3, before = (group.rank() + 2) % 3;
    const auto expectDone = [&](const std::shared_ptr<Message>& message) {
      ASSERT_TRUE(messages.wait(*message, soon()));
      ASSERT_TRUE(message->status().ok()) << message->status().error().message;
    };
    ready.arrive_and_wait();
    if (group.rank() == 0) trouble = std::make_unique<Troublemaker>(GetParam(), 1ms, 8ms);
    for (int n = 0; n < 300; ++n) {
      const size_t bytes = n % 3 ? 9000 + size_t(n) * 150 : 16 + size_t(n) % 800;
      const Bytes large = pattern(bytes, uint64_t(group.rank() * 1000 + n)),
                  small(large.end() - 8, large.end());
      const auto one = (*window)->put(large, next, kRoom, soon());
      const auto two = (*window)->put(small, next, kRoom + 3, soon());
      const auto signal = (*window)->signal(next, soon());
      ASSERT_TRUE(one.ok() && two.ok() && signal.ok());
      expectDone((*window)->awaitSignal(before, soon()));
      Bytes expected = pattern(bytes, uint64_t(before * 1000 + n));
      std::copy(expected.end() - 8, expected.end(), expected.begin() + 3);
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), memory.begin() + kRoom)) << n;
      for (const auto& message : {*one, *two, *signal}) expectDone(message);
      // Tells the other ranks that they may put again.
      const auto seen = (*window)->signal(before, soon());
      ASSERT_TRUE(seen.ok());
      expectDone((*window)->awaitSignal(next, soon()));
      expectDone(*seen);
    }
    std::atomic<bool> isOver{false};
    std::thread driver([&] {
      while (!isOver) {
        messages.progress();
        std::this_thread::sleep_for(1ms);
      }
    });
    done.arrive_and_wait();
    if (group.rank() == 0) {
      trouble->stop();
      EXPECT_GT(trouble->broken(), 0u);
    }
    expectPeace(group);
    EXPECT_TRUE((*window)->close(group, soon()).ok());
    isOver = true;
    driver.join();
    messages.abort({ErrorCode::kAborted, "the end"});
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, GroupReconnects, ::testing::Values(1, 2, 3));

// The same over a wire that breaks by itself, at one end only, and keeps no order.
class SimGroup : public ::testing::TestWithParam<uint64_t> {
 protected:
  Ranks ranks() const {
    return {.size = 3,
            .transports = {"sim"},
            .eagerBytes = 8 << 10,
            .failureTimeout = 20s,
            .simSeed = GetParam()};
  }
};

TEST_P(SimGroup, EveryResultIsExact) {
  std::atomic<uint32_t> flushes{0};
  std::latch done(3), seen(3);  // no rank leaves before all have looked
  runRanks(ranks(), [&](Group& group) {
    operate(group, GetParam(), 600);
    done.arrive_and_wait();
    expectPeace(group);
    flushes += group.agent().attempt().round;
    seen.arrive_and_wait();
  });
  EXPECT_GT(flushes, 0u) << "nothing broke";
}

TEST_P(SimGroup, EveryMessageComesOnce) {
  std::latch done(3);
  runRanks(ranks(), [&](Group& group) {
    PointToPoint messages(group);
    exchange(group, messages, 300);
    done.arrive_and_wait();
    expectPeace(group);
    expectNoneLeft(group, messages);
    ASSERT_TRUE(barrier(group, soon()).ok());
    messages.abort({ErrorCode::kAborted, "the end"});
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, SimGroup, ::testing::Values(1, 2, 3, 4));

// An idle rank, without an operation or a message, is connected again as well.
TEST(IdleGroup, ReconnectsAsWell) {
  std::latch ready(2), broken(2), sent(2);
  runRanks(overTcp(2), [&](Group& group) {
    PointToPoint messages(group);
    ready.arrive_and_wait();
    Bytes data = pattern(500, 1);
    if (group.rank() == 0) {
      // No thread drives the sender's messages when its connection breaks.
      SocketBreaker::breakAll(How::kReset);
      const auto message = messages.send(data, 1, 1, soon());
      EXPECT_TRUE(messages.wait(*message, soon()));
      EXPECT_TRUE(message->status().ok());
    }
    broken.arrive_and_wait();
    if (group.rank() == 1) {
      Bytes received(500);
      const auto message = messages.receive(received, 0, 1, soon());
      EXPECT_TRUE(messages.wait(*message, soon()));
      EXPECT_TRUE(message->status().ok());
      EXPECT_EQ(received, data);
    }
    sent.arrive_and_wait();
    expectPeace(group);
    ASSERT_TRUE(barrier(group, soon()).ok());
    messages.abort({ErrorCode::kAborted, "the end"});
  });
}

// ---- groups that are gone when the connection stands again

// Holds up the thread of an engine's loop. Meanwhile this engine neither calls nor answers a peer
// whose connection has broken.
class HeldLoop {
 public:
  explicit HeldLoop(EventLoop& loop) {
    std::promise<void> isHeld;
    loop.post([&isHeld, goesOn = goesOn_.get_future().share()] {
      isHeld.set_value();
      goesOn.wait();
    });
    isHeld.get_future().wait();
  }
  ~HeldLoop() { goesOn_.set_value(); }

 private:
  std::promise<void> goesOn_;
};

std::atomic<int> partsTold{0};

class GoneGroup : public ::testing::TestWithParam<const char*> {
 protected:
  // Rank 0 calls `go` while its connection is broken, so all that it sends is lost. Rank 1 calls
  // `rest` when the connection is being made again.
  void run(const std::function<void(Group& job)>& begin, const std::function<void(Group& job)>& go,
           const std::function<void(Group& job)>& rest) {
    std::latch begun(2), gone(2), over(2);
    EventLoop* loopOfOther = nullptr;
    runRanks({.size = 2, .transports = {GetParam()}, .failureTimeout = 20s}, [&](Group& job) {
      if (job.rank() == 1) loopOfOther = &job.engine().loop();
      begin(job);
      begun.arrive_and_wait();
      if (job.rank() == 0) {
        const HeldLoop held(*loopOfOther);
        SocketBreaker::breakAll(How::kReset);
        const auto& peer = job.membership()->peer(1);
        EXPECT_TRUE(eventually([&] {
          return peer->channel->put({{0, 64, 1}, 0, {}, {64, 1}}).code() == ErrorCode::kPeerLost;
        }));
        go(job);
      }
      gone.arrive_and_wait();
      if (job.rank() == 1) rest(job);
      expectPeace(job);
      over.arrive_and_wait();
    });
  }
  std::unique_ptr<Group> groupIn(Group& job) {
    auto group = Group::createWithin(
        job.membership(),
        {.name = "gone", .rank = job.rank(), .size = 2, .mailboxBytes = kMailboxBytes}, soon());
    EXPECT_TRUE(group.ok()) << group.error().message;
    return group.ok() ? std::move(*group) : nullptr;
  }

  std::unique_ptr<Group> groups_[2];  // by rank
};

// A rank that has not heard that another one has left would wait for it until its deadline.
TEST_P(GoneGroup, ItsLeaveIsHeardOf) {
  run(
      [&](Group& job) {
        groups_[job.rank()] = groupIn(job);
        ASSERT_TRUE(barrier(*groups_[job.rank()], soon()).ok());
      },
      [&](Group&) {
        groups_[0]->leave(Deadline::after(0s));
        groups_[0].reset();
      },
      [&](Group&) {
        EXPECT_TRUE(eventually([&] { return !groups_[1]->agent().isActive(0); }));
        groups_[1].reset();
      });
}

// Neither a message that it never sent comes, nor the acknowledgement of one that it has fetched.
TEST_P(GoneGroup, TheEndOfItsMessagesIsHeardOf) {
  std::unique_ptr<PointToPoint> messages[2];
  run(
      [&](Group& job) {
        const auto r = size_t(job.rank());
        groups_[r] = groupIn(job);
        messages[r] = std::make_unique<PointToPoint>(*groups_[r]);
        ASSERT_TRUE(barrier(*groups_[r], soon()).ok());
      },
      [&](Group&) {
        messages[0]->abort({ErrorCode::kAborted, "the end"});
        messages[0].reset();
        groups_[0].reset();
      },
      [&](Group&) {
        Bytes room(8);
        const auto message = messages[1]->receive(room, 0, 1, soon());
        EXPECT_TRUE(messages[1]->wait(*message, soon()));
        EXPECT_EQ(message->status().code(), ErrorCode::kPeerLost)
            << message->status().error().message;
        messages[1]->abort({ErrorCode::kAborted, "the end"});
        groups_[1].reset();
      });
}

// Rank 0 has rank 1's part, so it has made the group, and is gone before rank 1 has its part.
TEST_P(GoneGroup, ThatItWasMadeIsHeardOf) {
  constexpr uint64_t kDoor = 7;
  std::promise<void> hasCome;
  std::future<std::unique_ptr<Group>> making;
  partsTold = 0;
  observeFailpoints([](const char* name) { partsTold += std::string_view(name) == "part-told"; });
  run(
      [&](Group& job) {
        if (job.rank() == 1) {
          making = std::async(std::launch::async, [&] { return groupIn(job); });
          ASSERT_TRUE(eventually([&] { return partsTold == 1; }));
          // Arrives after the part.
          ASSERT_TRUE(job.engine().send(*job.membership()->peer(0), kDoor, Bytes(1)).ok());
        } else {
          job.engine().openTopic(kDoor, [&](const EngineId&, ByteView) { hasCome.set_value(); });
          hasCome.get_future().wait();
          job.engine().closeTopic(kDoor);
        }
      },
      [&](Group& job) {
        const auto group = groupIn(job);
        ASSERT_TRUE(group);
        group->leave(Deadline::after(0s));
      },
      [&](Group&) { EXPECT_NE(making.get(), nullptr); });
}

TEST_P(GoneGroup, ThatItCouldNotBeMadeIsHeardOf) {
  run([](Group&) {},
      [](Group& job) {
        const auto group = Group::createWithin(
            job.membership(), {.name = "gone", .rank = 0, .size = 2, .slotBytes = size_t(1) << 40},
            soon());
        EXPECT_EQ(group.status().code(), ErrorCode::kExhausted);
      },
      [](Group& job) {
        const auto group =
            Group::createWithin(job.membership(), {.name = "gone", .rank = 1, .size = 2}, soon());
        EXPECT_EQ(group.status().code(), ErrorCode::kAborted);
      });
}

INSTANTIATE_TEST_SUITE_P(Wires, GoneGroup, ::testing::Values("tcp", "sim"));

}  // namespace
}  // namespace mooncake::test
