#include <atomic>
#include <csignal>
#include <cstring>
#include <thread>

#include "child_process.h"
#include "proxy_ranks.h"

// Peers in processes of their own are killed and stopped while kernels push commands to them.
namespace mooncake::proxy {
namespace {

using kernels::ProxyEnd;
using kernels::ProxyResult;
using mooncake::testing::ChildProcess;
using mooncake::testing::receiveMessage;
using mooncake::testing::sendMessage;
using std::chrono_literals::operator""s;

constexpr uint32_t kRanks = 3, kWords = 8;
constexpr size_t kBytes = 2048;

// A peer: it tells its address and regions. At a message it closes its proxy, and sends its
// target's bytes.
TEST(ProxyPeer, DISABLED_Child) {
  if (!ChildProcess::isChild()) GTEST_SKIP() << "runs in children of other tests";
  const Bytes wire = receiveMessage(ChildProcess::kFromParent);
  const Bytes number = receiveMessage(ChildProcess::kFromParent);
  ProxyRank rank(std::string(reinterpret_cast<const char*>(wire.data()), wire.size()));
  rank.create({.rank = uint32_t(number.at(0)), .ranks = kRanks, .signalWords = kWords});
  sendMessage(ChildProcess::kToParent, rank.engine->endpoint());
  sendMessage(ChildProcess::kToParent, rank.proxy->describe());
  if (receiveMessage(ChildProcess::kFromParent).empty()) return;
  rank.proxy->close();
  sendMessage(ChildProcess::kToParent, ByteView(rank.target).first(32 * kBytes - 64));
  EXPECT_TRUE(receiveMessage(ChildProcess::kFromParent).empty());  // until the parent is done
}

// Rank 0 in this process, ranks 1 and 2 in others.
class ProxyFaults : public ::testing::TestWithParam<const char*> {
 protected:
  void start(ProxyOptions options) {
    rank = std::make_unique<ProxyRank>(GetParam());
    options.ranks = kRanks;
    options.signalWords = kWords;
    rank->create(options);
    const Bytes data = pattern(kRegionBytes, 4);
    std::copy(data.begin(), data.end(), rank->source.begin());
    std::vector<std::shared_ptr<Peer>> peers(1);
    std::vector<Bytes> descriptions(1);
    const std::string wire = GetParam();
    for (uint32_t peer = 1; peer < kRanks; ++peer) {
      children.push_back(std::make_unique<ChildProcess>("ProxyPeer.DISABLED_Child"));
      children.back()->send(std::as_bytes(std::span(wire)));
      children.back()->send(Bytes{std::byte(peer)});
    }
    for (uint32_t peer = 1; peer < kRanks; ++peer) {
      peers.push_back(rank->open(child(peer).receive(), "rank " + std::to_string(peer)));
      descriptions.push_back(child(peer).receive());
    }
    ASSERT_TRUE(rank->proxy->attach(peers, descriptions).ok());
    view = rank->proxy->view();
  }
  ChildProcess& child(uint32_t peer) { return *children[peer - 1]; }
  kernels::ProxyPut command(uint64_t n) const {
    const uint64_t at = n % 31 * kBytes;
    return {0, 1, at, at, kBytes, n % 9 < kWords ? uint32_t(n % 9) : kernels::kNoSignal};
  }
  // Whether the peer has the data of commands 0 to 30.
  bool hasAll(uint32_t peer) {
    child(peer).send(Bytes(1));
    const Bytes there = child(peer).receive();
    return there.size() >= 31 * kBytes &&
           std::equal(there.begin(), there.begin() + 31 * kBytes, rank->source.begin());
  }
  // Block 0 pushes to rank 1 until its ring ends, block 1 pushes so many commands to rank 2.
  // `onCommands` is called beside the kernel, once some commands to rank 1 have completed.
  void pushWhile(const std::function<void()>& onCommands, uint64_t toOther) {
    std::atomic<bool> isOver{false};
    std::thread other([&] {
      while (!isOver && completed(1) < 20) std::this_thread::yield();
      onCommands();
    });
    runKernel(2, 1, [&] {
      if (blockIdx.x == 0) {
        for (uint64_t n = 0; last == ProxyResult::kDone; ++n) {
          last = kernels::put(view, 1, command(n)).result;
          if (n % 5 == 4 && last == ProxyResult::kDone) last = kernels::flush(view, 1);
        }
      } else {
        for (uint64_t n = 0; n < toOther; ++n) {
          failures += kernels::put(view, 2, command(n)).result != ProxyResult::kDone;
          if (n % 5 == 4) failures += kernels::flush(view, 2) != ProxyResult::kDone;
        }
        failures += kernels::flush(view, 2) != ProxyResult::kDone;
      }
    });
    isOver = true;
    other.join();
  }
  uint32_t completed(uint32_t peer) const {
    return std::atomic_ref(const_cast<uint32_t&>(view.counts[peer].completed)).load();
  }

  std::unique_ptr<ProxyRank> rank;
  std::vector<std::unique_ptr<ChildProcess>> children;
  kernels::ProxyView view{};
  ProxyResult last = ProxyResult::kDone;
  unsigned failures = 0;
};
INSTANTIATE_TEST_SUITE_P(All, ProxyFaults, ::testing::Values("tcp", "fabric", "sim"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(ProxyFaults, AKilledPeerEndsItsRing) {
  start({.slots = 16, .threads = 2, .timeout = 20s, .kernelTimeout = 60s});
  pushWhile([&] { child(1).kill(); }, 300);
  EXPECT_EQ(last, ProxyResult::kEnded);
  EXPECT_EQ(failures, 0u);
  EXPECT_TRUE(hasAll(2));
  const Status status = rank->proxy->statusOf(1);
  ASSERT_EQ(status.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(view.counts[1].ended, uint32_t(ProxyEnd::kPeerLost));
  EXPECT_NE(status.error().message.find("rank 0, proxy to rank 1"), std::string::npos);
  EXPECT_TRUE(rank->proxy->statusOf(2).ok());
}

TEST_P(ProxyFaults, AStoppedPeerEndsItsRing) {
  start({.slots = 16, .timeout = 4s, .kernelTimeout = 60s});
  pushWhile([&] { ::kill(child(1).pid(), SIGSTOP); }, 300);
  EXPECT_EQ(last, ProxyResult::kEnded);
  EXPECT_EQ(failures, 0u);
  EXPECT_TRUE(hasAll(2));
  const Status status = rank->proxy->statusOf(1);
  ASSERT_FALSE(status.ok());
  EXPECT_TRUE(status.code() == ErrorCode::kTimeout || status.code() == ErrorCode::kPeerLost)
      << status.error().message;
  EXPECT_TRUE(rank->proxy->statusOf(2).ok());
}

// The ranks go on without it. Its ring does not wait for the timeout.
TEST_P(ProxyFaults, TheRingOfAStoppedPeerIsEnded) {
  start({.slots = 16, .timeout = 600s, .kernelTimeout = 600s});
  Status ended = {ErrorCode::kAborted, "it was not called"};
  pushWhile(
      [&] {
        ::kill(child(1).pid(), SIGSTOP);
        ended = rank->proxy->end(1, Deadline::after(60s));
      },
      300);
  EXPECT_TRUE(ended.ok()) << ended.error().message;
  EXPECT_EQ(last, ProxyResult::kEnded);
  EXPECT_EQ(failures, 0u);
  EXPECT_TRUE(hasAll(2));
  EXPECT_EQ(rank->proxy->statusOf(1).code(), ErrorCode::kPeerLost);
  EXPECT_TRUE(rank->proxy->statusOf(2).ok());
}

// The ring of a stopped peer fills up. A kernel that gives up loses none of the commands that the
// ring has taken, and later ones go through.
TEST_P(ProxyFaults, AFullRingHoldsBackAndLosesNothing) {
  start({.slots = 16, .timeout = 60s, .kernelTimeout = 60s});
  kernels::ProxyView hasty = view;
  hasty.timeoutNs = 500'000'000;
  uint64_t done = 0;
  runKernel(1, 1, [&] {
    for (uint64_t n = 0; n < 5; ++n) kernels::put(view, 1, command(n));
    EXPECT_EQ(kernels::flush(view, 1), ProxyResult::kDone);
  });
  ::kill(child(1).pid(), SIGSTOP);
  runKernel(1, 1, [&] {
    for (uint64_t n = 0; n < 10'000 && last == ProxyResult::kDone; ++n) {
      last = kernels::put(hasty, 1, command(n)).result;
      done += last == ProxyResult::kDone;
    }
    // Another peer's ring is its own.
    EXPECT_EQ(kernels::put(view, 2, command(0)).result, ProxyResult::kDone);
    EXPECT_EQ(kernels::flush(view, 2), ProxyResult::kDone);
  });
  EXPECT_EQ(last, ProxyResult::kLate);
  EXPECT_GE(done, 16u);
  ::kill(child(1).pid(), SIGCONT);
  EXPECT_TRUE(eventually([&] { return completed(1) == 5 + done; }));
  runKernel(1, 1, [&] {
    EXPECT_EQ(kernels::put(view, 1, command(30)).result, ProxyResult::kDone);
    EXPECT_EQ(kernels::flush(view, 1), ProxyResult::kDone);
  });
  EXPECT_TRUE(hasAll(1));
  EXPECT_TRUE(rank->proxy->statusOf(1).ok());
}

}  // namespace
}  // namespace mooncake::proxy
