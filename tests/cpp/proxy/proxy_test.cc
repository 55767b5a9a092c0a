#include <atomic>
#include <cstring>
#include <thread>

#include "proxy_ranks.h"

// Kernels of the emulator push commands to ranks of this process.
namespace mooncake::proxy {
namespace {

using kernels::kNoSignal;
using kernels::ProxyResult;
using std::chrono_literals::operator""s;
using std::chrono_literals::operator""ms;

constexpr auto kWires = {"tcp", "fabric", "sim"};

class ProxyWires : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, ProxyWires, ::testing::ValuesIn(kWires),
                         [](const auto& info) { return std::string(info.param); });

unsigned thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

void fill(Bytes& memory, uint64_t seed) {
  const Bytes data = pattern(memory.size(), seed);
  std::copy(data.begin(), data.end(), memory.begin());
}

// Threads of blocks push commands of many sizes to two peers, with and without signals. Each peer
// has a thread of the host. The peers' kernels wait for the signals and then find the data.
TEST_P(ProxyWires, CommandsArriveWithTheirSignals) {
  constexpr unsigned kThreads = 12, kEach = 9, kWords = 4;
  constexpr size_t kRoom = kRegionBytes / (kThreads * kEach) / 64 * 64;
  auto ranks = makeRanks(
      GetParam(), 3,
      {.slots = 16, .signalWords = kWords, .threads = 2, .timeout = 60s, .kernelTimeout = 60s});
  fill(ranks[0]->source, 5);
  const kernels::ProxyView view = ranks[0]->proxy->view();
  const auto bytesOf = [](size_t place) { return place % 5 == 0 ? kRoom : place % 7 * 40; };
  std::vector<std::thread> receivers;
  std::atomic<unsigned> right{0};
  for (uint32_t peer : {1u, 2u}) {
    receivers.emplace_back([&, peer] {
      const kernels::ProxyView theirs = ranks[peer]->proxy->view();
      runKernel(1, kWords, [&, peer] {
        // Commands i of all threads name word i % (kWords + 1), if there is one.
        const unsigned word = threadIdx.x;
        uint64_t count = 0;
        for (unsigned i = 0; i < kEach; ++i) count += i % (kWords + 1) == word ? kThreads : 0;
        if (kernels::awaitSignal(theirs, 0, word, count) != ProxyResult::kDone) return;
        for (size_t place = 0; place < kThreads * kEach; ++place) {
          if (place % kEach % (kWords + 1) != word) continue;
          const size_t at = place * kRoom;
          right +=
              std::memcmp(&ranks[peer]->target[at], &ranks[0]->source[at], bytesOf(place)) == 0;
        }
      });
    });
  }
  std::vector<unsigned> failures(kThreads);
  runKernel(3, kThreads / 3, [&] {
    for (unsigned i = 0; i < kEach; ++i) {
      const size_t place = size_t(thread()) * kEach + i;
      const unsigned word = i % (kWords + 1);
      for (uint32_t peer : {1u, 2u}) {
        const auto ticket = kernels::put(view, peer,
                                         {.sourceRegion = 0,
                                          .targetRegion = 1,
                                          .sourceOffset = place * kRoom,
                                          .targetOffset = place * kRoom,
                                          .bytes = bytesOf(place),
                                          .signal = word < kWords ? word : kNoSignal});
        failures[thread()] += ticket.result != ProxyResult::kDone;
      }
    }
    for (uint32_t peer : {1u, 2u})
      failures[thread()] += kernels::flush(view, peer) != ProxyResult::kDone;
  });
  for (auto& receiver : receivers) receiver.join();
  for (const unsigned count : failures) EXPECT_EQ(count, 0u);
  unsigned signalled = 0;
  for (size_t place = 0; place < kThreads * kEach; ++place) {
    signalled += place % kEach % (kWords + 1) < kWords;
    for (uint32_t peer : {1u, 2u}) {
      EXPECT_EQ(std::memcmp(&ranks[peer]->target[place * kRoom], &ranks[0]->source[place * kRoom],
                            bytesOf(place)),
                0)
          << place;
    }
  }
  EXPECT_EQ(right, 2 * signalled);
  for (uint32_t peer : {1u, 2u}) EXPECT_TRUE(ranks[0]->proxy->statusOf(peer).ok());
}

// A word's value n tells that the first n commands that name it have arrived.
TEST_P(ProxyWires, ASignalCountsInTheOrderOfTheRing) {
  constexpr uint64_t kCount = 60, kBytes = 3000;
  auto ranks = makeRanks(GetParam(), 2,
                         {.slots = 8, .signalWords = 1, .timeout = 60s, .kernelTimeout = 60s}, 7);
  fill(ranks[0]->source, 3);
  uint64_t right = 0;
  std::thread receiver([&] {
    const kernels::ProxyView theirs = ranks[1]->proxy->view();
    runKernel(1, 1, [&] {
      for (uint64_t n = 1; n <= kCount; ++n) {
        if (kernels::awaitSignal(theirs, 0, 0, n) != ProxyResult::kDone) return;
        const size_t at = (n - 1) * kBytes;
        right += std::memcmp(&ranks[1]->target[at], &ranks[0]->source[at], kBytes) == 0;
      }
    });
  });
  const kernels::ProxyView view = ranks[0]->proxy->view();
  runKernel(1, 1, [&] {
    for (uint64_t n = 0; n < kCount; ++n)
      kernels::put(view, 1, {0, 1, n * kBytes, n * kBytes, kBytes, 0});
    EXPECT_EQ(kernels::flush(view, 1), ProxyResult::kDone);
  });
  receiver.join();
  EXPECT_EQ(right, kCount);
}

// Connections of this wire break all the time, and are made again. No command is lost.
TEST(ProxySim, BreaksLoseNothing) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    constexpr uint64_t kCount = 400, kBytes = 600;
    auto ranks = makeRanks(
        "sim", 2, {.slots = 64, .signalWords = 8, .timeout = 60s, .kernelTimeout = 60s}, seed);
    fill(ranks[0]->source, seed);
    const kernels::ProxyView view = ranks[0]->proxy->view();
    runKernel(1, 4, [&] {
      for (uint64_t n = threadIdx.x; n < kCount; n += 4) {
        const uint32_t word = n % 10 < 8 ? uint32_t(n % 10) : kNoSignal;
        kernels::put(view, 1, {0, 1, n * kBytes, n * kBytes, kBytes, word});
      }
      EXPECT_EQ(kernels::flush(view, 1), ProxyResult::kDone);
    });
    EXPECT_EQ(std::memcmp(ranks[1]->target.data(), ranks[0]->source.data(), kCount * kBytes), 0);
    const kernels::ProxyView theirs = ranks[1]->proxy->view();
    for (uint32_t word = 0; word < 8; ++word) EXPECT_EQ(theirs.signals[word], kCount / 10) << seed;
  }
}

struct WrongCase {
  const char* name;
  kernels::ProxyPut put;
  const char* cause;
};

class ProxyWrongCommands : public ::testing::TestWithParam<WrongCase> {};
constexpr uint64_t kHuge = ~uint64_t(0);
INSTANTIATE_TEST_SUITE_P(
    All, ProxyWrongCommands,
    ::testing::Values(
        WrongCase{"SourceRegion", {2, 1, 0, 0, 8, 0}, "this rank has 2 regions"},
        WrongCase{"TargetRegion", {0, 9, 0, 0, 8, 0}, "the peer has 2 regions"},
        WrongCase{"BeyondTheSource", {0, 1, kRegionBytes - 7, 0, 8, 0}, "the source has"},
        WrongCase{"BeyondTheTarget", {0, 1, 0, kRegionBytes - 7, 8, 0}, "the target has"},
        WrongCase{"SourceOffset", {0, 1, kHuge, 0, 8, 0}, "the source has"},
        WrongCase{"TargetOffset", {0, 1, 0, kHuge - 3, 8, 0}, "the target has"},
        WrongCase{"Bytes", {0, 1, 0, 0, kHuge, 0}, "at most 64 MiB"},
        WrongCase{"Signal", {0, 1, 0, 0, 8, 4}, "signal word 4"}),
    [](const auto& info) { return std::string(info.param.name); });

// It ends its ring with an error that names it; nothing is written, and other rings go on.
TEST_P(ProxyWrongCommands, EndTheirRing) {
  auto ranks = makeRanks("tcp", 3, {.signalWords = 4});
  fill(ranks[0]->source, 1);
  const kernels::ProxyView view = ranks[0]->proxy->view();
  runKernel(1, 1, [&] {
    const auto ticket = kernels::put(view, 1, GetParam().put);
    EXPECT_EQ(kernels::awaitCommand(view, 1, ticket.number), ProxyResult::kEnded);
    kernels::put(view, 1, {0, 1, 0, 0, 64, 0});
    EXPECT_EQ(kernels::flush(view, 1), ProxyResult::kEnded);
    kernels::put(view, 2, {0, 1, 0, 0, 64, 0});
    EXPECT_EQ(kernels::flush(view, 2), ProxyResult::kDone);
  });
  EXPECT_EQ(view.counts[1].ended, uint32_t(kernels::ProxyEnd::kWrongCommand));
  const Status status = ranks[0]->proxy->statusOf(1);
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  ASSERT_FALSE(status.ok());
  for (const char* part : {"rank 0, proxy to rank 1: command 0", GetParam().cause, "correct"})
    EXPECT_NE(status.error().message.find(part), std::string::npos) << status.error().message;
  EXPECT_TRUE(ranks[0]->proxy->statusOf(2).ok());
  EXPECT_EQ(ranks[1]->target, Bytes(kRegionBytes));
  EXPECT_EQ(ranks[1]->source, Bytes(kRegionBytes));
}

// The kernel does not wait: the host does, and then all is there.
TEST_P(ProxyWires, TheHostFlushes) {
  constexpr unsigned kThreads = 8;
  constexpr size_t kBytes = kRegionBytes / kThreads;
  auto ranks = makeRanks(GetParam(), 3, {.threads = 2, .timeout = 60s, .kernelTimeout = 60s});
  fill(ranks[0]->source, 9);
  const kernels::ProxyView view = ranks[0]->proxy->view();
  const auto push = [&] {
    runKernel(1, kThreads, [&] {
      for (uint32_t peer : {1u, 2u}) {
        (void)kernels::put(view, peer,
                           {.sourceRegion = 0,
                            .targetRegion = 1,
                            .sourceOffset = thread() * kBytes,
                            .targetOffset = thread() * kBytes,
                            .bytes = kBytes,
                            .signal = peer == 1 ? 0 : kNoSignal});
      }
    });
  };
  for (uint64_t round = 1; round <= 5; ++round) {
    fill(ranks[0]->source, round);
    push();
    const Status flushed = ranks[0]->proxy->flush(Deadline::after(60s));
    ASSERT_TRUE(flushed.ok()) << flushed.error().message;
    for (uint32_t peer : {1u, 2u}) {
      EXPECT_EQ(ranks[peer]->target, ranks[0]->source);
      EXPECT_EQ(view.counts[peer].completed, round * kThreads);
    }
    EXPECT_EQ(ranks[1]->proxy->view().signals[0], round * kThreads);
  }
  // A ring that has ended holds up nothing.
  ranks[2]->proxy->close();
  push();
  EXPECT_TRUE(ranks[0]->proxy->flush(Deadline::after(60s)).ok());
  EXPECT_FALSE(ranks[0]->proxy->statusOf(2).ok());
  EXPECT_EQ(view.counts[1].completed, 6 * kThreads);
}

// Kernels stop, no thread is left, and nothing lands after the target's proxy is closed.
TEST_P(ProxyWires, CloseWithCommandsUnderWay) {
  auto ranks = makeRanks(GetParam(), 2, {.slots = 64, .timeout = 60s, .kernelTimeout = 60s});
  EXPECT_EQ(threadsNamed("mooncake-proxy"), 1u);
  fill(ranks[0]->source, 2);
  const kernels::ProxyView view = ranks[0]->proxy->view();
  std::atomic<bool> hasBegun{false};
  ProxyResult last = ProxyResult::kDone;
  std::thread kernel([&] {
    runKernel(1, 1, [&] {
      for (uint64_t n = 0; last == ProxyResult::kDone; ++n) {
        const uint64_t at = n % 8 * (kRegionBytes / 8);
        last = kernels::put(view, 1, {0, 1, at, at, kRegionBytes / 8, uint32_t(n % 3)}).result;
        hasBegun = n > 20;
      }
    });
  });
  EXPECT_TRUE(eventually([&] { return hasBegun.load(); }));
  ranks[0]->proxy->close();
  kernel.join();
  EXPECT_EQ(last, ProxyResult::kEnded);
  EXPECT_EQ(threadsNamed("mooncake-proxy"), 0u);
  EXPECT_EQ(ranks[0]->proxy->statusOf(1).code(), ErrorCode::kAborted);
  fill(ranks[0]->source, 99);
  ranks[1]->proxy->close();
  const Bytes then = ranks[1]->target;
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(then, ranks[1]->target);
}

// Other rings go on. The source may change once the call returns: nothing of it lands from then on.
TEST_P(ProxyWires, AnEndedRingReadsItsSourceNoMore) {
  constexpr uint64_t kPlaces = 8, kBytes = kRegionBytes / kPlaces;
  for (uint64_t round = 1; round <= 5; ++round) {
    auto ranks =
        makeRanks(GetParam(), 3, {.slots = 64, .timeout = 60s, .kernelTimeout = 60s}, round);
    std::ranges::fill(ranks[0]->source, std::byte{1});
    const kernels::ProxyView view = ranks[0]->proxy->view();
    std::atomic<bool> hasBegun{false};
    ProxyResult last = ProxyResult::kDone;
    std::thread kernel([&] {
      runKernel(1, 1, [&] {
        for (uint64_t n = 0; last == ProxyResult::kDone; ++n) {
          const uint64_t at = n % kPlaces * kBytes;
          last = kernels::put(view, 1, {0, 1, at, at, kBytes, uint32_t(n % 3)}).result;
          hasBegun = n > 20;
        }
      });
    });
    EXPECT_TRUE(eventually([&] { return hasBegun.load(); }));
    const Status ended = ranks[0]->proxy->end(1, Deadline::after(60s));
    ASSERT_TRUE(ended.ok()) << ended.error().message;
    std::ranges::fill(ranks[0]->source, std::byte{2});
    kernel.join();
    EXPECT_EQ(last, ProxyResult::kEnded);
    EXPECT_EQ(view.counts[1].ended, uint32_t(kernels::ProxyEnd::kPeerLost));
    const Status status = ranks[0]->proxy->statusOf(1);
    ASSERT_EQ(status.code(), ErrorCode::kPeerLost);
    EXPECT_NE(status.error().message.find("the other ranks go on without it"), std::string::npos);
    runKernel(1, 1, [&] {
      EXPECT_EQ(kernels::put(view, 2, {0, 1, 0, 0, kBytes, 0}).result, ProxyResult::kDone);
      EXPECT_EQ(kernels::flush(view, 2), ProxyResult::kDone);
    });
    EXPECT_EQ(ranks[2]->target[kBytes - 1], std::byte{2});
    ranks[1]->proxy->close();
    EXPECT_EQ(std::ranges::count(ranks[1]->target, std::byte{2}), 0) << round;
    // A ring that has ended, and a rank without one.
    EXPECT_TRUE(ranks[0]->proxy->end(1, Deadline::after(0s)).ok());
    EXPECT_TRUE(ranks[0]->proxy->end(0, Deadline::after(0s)).ok());
  }
}

// Each thread has about as many rings, whichever ranks have one. No thread is idle.
TEST(ProxyThreads, ShareThePeers) {
  constexpr uint32_t kRanks = 6;
  const ProxyOptions options{.ranks = kRanks, .threads = 3, .timeout = 60s, .kernelTimeout = 60s};
  std::vector<std::unique_ptr<ProxyRank>> ranks;
  std::vector<std::shared_ptr<Peer>> peers;
  std::vector<Bytes> descriptions;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<ProxyRank>("tcp"));
    ProxyOptions theirs = options;
    theirs.rank = rank;
    ranks.back()->create(theirs);
    const bool hasRing = rank % 2 == 1;
    descriptions.push_back(hasRing ? ranks.back()->proxy->describe() : Bytes());
    peers.push_back(
        hasRing ? ranks[0]->open(ranks.back()->engine->endpoint(), "rank " + std::to_string(rank))
                : nullptr);
  }
  fill(ranks[0]->source, 4);
  ASSERT_TRUE(ranks[0]->proxy->attach(peers, descriptions).ok());
  EXPECT_EQ(threadsNamed("mooncake-proxy"), 3u);
  const kernels::ProxyView view = ranks[0]->proxy->view();
  runKernel(1, kRanks, [&] {
    const uint32_t peer = threadIdx.x;
    if (peer % 2 == 0) return;
    EXPECT_EQ(kernels::put(view, peer, {0, 1, 0, 0, kRegionBytes, 0}).result, ProxyResult::kDone);
    EXPECT_EQ(kernels::flush(view, peer), ProxyResult::kDone);
  });
  for (const uint32_t peer : {1u, 3u, 5u}) EXPECT_EQ(ranks[peer]->target, ranks[0]->source);
  ranks[0]->proxy->close();
  EXPECT_EQ(threadsNamed("mooncake-proxy"), 0u);
  // One peer has one thread.
  const auto pair = makeRanks("tcp", 2, {.threads = 3});
  EXPECT_EQ(threadsNamed("mooncake-proxy"), 1u);
}

TEST(ProxyThreads, AreAsManyAsTheCards) {
  const auto engineWith = [](std::vector<std::string> wires, std::vector<std::string> cards,
                             size_t setting) {
    EngineOptions options{
        .jobKey = Bytes(32, std::byte{1}), .logName = "test", .arenaBytes = size_t(1) << 30};
    options.env.transports = std::move(wires);
    options.env.hostIp = "127.0.0.1";
    options.env.proxyThreads = setting;
    options.env.fabricProvider = "tcp;ofi_rxm";
    options.env.fabricProviderWish = "this test";
    options.env.fabricDevices = std::move(cards);
    auto made = Engine::create(std::move(options));
    EXPECT_TRUE(made.ok()) << made.error().message;
    return made.ok() ? *made : nullptr;
  };
  const auto none = engineWith({"tcp"}, {}, 0);
  ASSERT_TRUE(none);
  EXPECT_EQ(none->cardCount(), 0u);
  EXPECT_EQ(threadsFor(*none, 8), 1u);
  const auto two = engineWith({"fabric"}, {"127.0.0.1", "127.0.0.2"}, 0);
  ASSERT_TRUE(two);
  EXPECT_EQ(two->cardCount(), 2u);
  EXPECT_EQ(threadsFor(*two, 8), 2u);
  EXPECT_EQ(threadsFor(*two, 1), 1u);
  EXPECT_EQ(threadsFor(*two, 0), 1u);
  const auto told = engineWith({"tcp"}, {}, 5);
  ASSERT_TRUE(told);
  EXPECT_EQ(threadsFor(*told, 8), 5u);
  EXPECT_EQ(threadsFor(*told, 3), 3u);
}

TEST(ProxyOptionsTest, AreChecked) {
  ProxyRank rank("tcp");
  const auto refuses = [&](ProxyOptions options, const char* text) {
    const auto made = Proxy::create(rank.engine, {}, options);
    EXPECT_FALSE(made.ok());
    if (!made.ok())
      EXPECT_NE(made.error().message.find(text), std::string::npos) << made.error().message;
  };
  refuses({.ranks = 0}, "1 to 1024 ranks");
  refuses({.rank = 2, .ranks = 2}, "own rank");
  refuses({.slots = 3}, "power of two");
  refuses({.slots = 1u << 20}, "slots");
  refuses({.signalWords = 0}, "signal words");
  refuses({.threads = 0}, "threads");
}

// A description that is cut short, has another version or contradicts itself is refused.
TEST(ProxyRegions, AreReadWithBounds) {
  const Regions regions{
      .ranks = 2, .signalWords = 3, .signals = {1, 64 + 48, 2}, .regions = {{{4, 5, 6}}}};
  const Bytes bytes = regions.encode();
  const auto read = Regions::decode(bytes, "rank 1");
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->regions.at(0).remote.bytes, 5u);
  EXPECT_EQ(read->wordsOf(1), 64u + 24);
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(Regions::decode(ByteView(bytes).first(length), "rank 1").ok()) << length;
  Bytes other = bytes;
  other[0] = std::byte{9};
  EXPECT_NE(Regions::decode(other, "rank 1").error().message.find("version 9"), std::string::npos);
  other = bytes;
  other[4] = std::byte{3};  // three ranks have more words than the region
  EXPECT_FALSE(Regions::decode(other, "rank 1").ok());
  other = bytes;
  other[36] = std::byte{200};
  EXPECT_FALSE(Regions::decode(other, "rank 1").ok());
}

}  // namespace
}  // namespace mooncake::proxy
