#include <csignal>
#include <sys/wait.h>

#include "child_process.h"
#include "nic_suite.h"
#include "wires/nic/libfabric/cards.h"

namespace mooncake::testing {
namespace {

FabricEnv onProvider(const std::string& provider, const std::string& device) {
  FabricEnv env;
  env.requiredProvider = provider;
  if (!device.empty()) env.devices = {device};
  return env;
}

Result<std::unique_ptr<Nic>> openFirst(const FabricEnv& env) {
  auto cards = listLibfabricCards(env);
  if (!cards.ok()) {
    // Every libfabric has this provider. The others depend on its version.
    EXPECT_TRUE(env.requiredProvider != "tcp;ofi_rxm" || !describeLibfabric(env).ok())
        << cards.error().message;
    return cards.error();
  }
  return openLibfabricNic(cards->front(), env);
}

struct OverTcp {
  static Result<std::unique_ptr<Nic>> open() {
    return openFirst(onProvider("tcp;ofi_rxm", "127.0.0.1"));
  }
  static constexpr bool kMovesBytes = true;
  static constexpr bool kChecksKeys = true;
  static constexpr bool kNoticesTheGone = true;
  static constexpr std::chrono::milliseconds kTimeout{500};
};
INSTANTIATE_TYPED_TEST_SUITE_P(LibfabricTcpRxm, NicSuite, OverTcp);

struct OverShm : OverTcp {
  static Result<std::unique_ptr<Nic>> open() { return openFirst(onProvider("shm", "")); }
  // Provider shm 1.17 hangs after a request that it refuses, and reads the memory of a peer that is
  // gone. So it is for measurements only.
  static constexpr bool kChecksKeys = false;
  static constexpr bool kNoticesTheGone = false;
};
INSTANTIATE_TYPED_TEST_SUITE_P(LibfabricShm, NicSuite, OverShm);

struct OverSockets : OverTcp {
  static Result<std::unique_ptr<Nic>> open() {
    return openFirst(onProvider("sockets", "127.0.0.1"));
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(LibfabricSockets, NicSuite, OverSockets);

// ---- across processes

constexpr const char* kProviderVariable = "MOONCAKE_FABRIC_REQUIRE";
constexpr const char* kDeviceVariable = "MC_TE_FILTERS";
constexpr size_t kServedBytes = 1 << 20;

// Serves its memory, and sends received messages back, until its parent lets go.
TEST(LibfabricPeer, DISABLED_Serves) {
  if (!ChildProcess::isChild()) GTEST_SKIP();
  const auto env = FabricEnv::read();
  ASSERT_TRUE(env.ok());
  auto nic = openFirst(*env);
  ASSERT_TRUE(nic.ok()) << nic.error().message;
  NicBlock served(**nic, kServedBytes, kBothRights), inbox(**nic, 64 * 4096);
  const NicKey key = served.memory->key();
  sendMessage(ChildProcess::kToParent,
              ByteWriter().putBytes((*nic)->address()).put(key.key).put(key.base).take());
  const Bytes parentAddress = receiveMessage(ChildProcess::kFromParent);
  const auto parent = (*nic)->insert(parentAddress);
  ASSERT_TRUE(parent.ok());
  for (uintptr_t i = 0; i < 64; ++i)
    ASSERT_TRUE((*nic)->receive(inbox.at(i * 4096, 4096), tagOf(i)).ok());
  std::atomic<bool> isOver{false};
  std::thread watcher([&] {
    receiveMessage(ChildProcess::kFromParent);
    isOver = true;
    (*nic)->wake();
  });
  while (!isOver) {
    std::array<NicCompletion, 16> some;
    const size_t count = (*nic)->poll(some);
    for (const NicCompletion& one : std::span(some).first(count)) {
      const auto i = reinterpret_cast<uintptr_t>(one.context);
      if (one.kind == NicCompletion::Kind::kReceived && one.error == NicError::kNone) {
        EXPECT_TRUE((*nic)->send(*parent, inbox.at(i * 4096, one.bytes), {}, one.context).ok());
      } else if (one.kind == NicCompletion::Kind::kSent) {
        EXPECT_TRUE((*nic)->receive(inbox.at(i * 4096, 4096), one.context).ok());
      }
    }
    if (count == 0) (*nic)->wait(Deadline::after(std::chrono::seconds(1)));
  }
  watcher.join();
}

class LibfabricProcesses : public ::testing::TestWithParam<std::pair<const char*, const char*>> {
 protected:
  static constexpr std::chrono::milliseconds kTimeout{300};

  struct Server {
    std::unique_ptr<ChildProcess> process;
    NicPeer peer = 0;
    NicKey key;
  };

  void SetUp() override {
    FabricEnv env = onProvider(GetParam().first, GetParam().second);
    env.timeout = kTimeout;
    auto opened = openFirst(env);
    if (!opened.ok()) GTEST_SKIP() << opened.error().message;
    end.nic = std::move(*opened);
  }

  void start(Server& server) {
    server.process = std::make_unique<ChildProcess>(
        "LibfabricPeer.DISABLED_Serves",
        std::map<std::string, std::string>{{kProviderVariable, GetParam().first},
                                           {kDeviceVariable, GetParam().second}});
    const Bytes hello = server.process->receive();
    ByteReader in(hello);
    const ByteView address = in.getBytes(256);
    auto peer = end.nic->insert(address);
    ASSERT_TRUE(peer.ok()) << peer.error().message;
    server.peer = *peer;
    server.key.key = in.get<uint64_t>();
    server.key.base = in.get<uint64_t>();
    ASSERT_TRUE(in.finish("hello").ok());
    server.process->send(end.nic->address());
  }

  template <typename Condition>
  bool until(Condition holds) {
    const auto deadline = Deadline::after(kNicPatience);
    while (!holds()) {
      if (deadline.passed()) return false;
      const size_t before = end.done.size();
      end.poll();
      if (end.done.size() == before) end.nic->wait(Deadline::after(std::chrono::milliseconds(5)));
    }
    return true;
  }

  NicCompletion only() {
    if (!until([&] { return !end.done.empty(); })) {
      ADD_FAILURE() << "nothing has completed";
      return {.error = NicError::kDevice};
    }
    const NicCompletion first = end.done.front();
    end.done.pop_front();
    return first;
  }

  bool writeWorks(const Server& server) {
    NicBlock source(*end.nic, 4096);
    EXPECT_TRUE(end.nic->write(server.peer, source.all(), server.key, 0, tagOf(77)).ok());
    const NicCompletion written = only();
    EXPECT_EQ(written.context, tagOf(77));
    return written.error == NicError::kNone;
  }

  NicEnd end;
};

TEST_P(LibfabricProcesses, WriteReadAndEcho) {
  Server server;
  start(server);
  NicBlock source(*end.nic, kServedBytes), target(*end.nic, kServedBytes);
  source.fill(5);
  ASSERT_TRUE(end.nic->write(server.peer, source.all(), server.key, 0, tagOf(1)).ok());
  EXPECT_EQ(only().error, NicError::kNone);
  ASSERT_TRUE(end.nic->read(server.peer, target.all(), server.key, 0, tagOf(2)).ok());
  EXPECT_EQ(only().error, NicError::kNone);
  EXPECT_TRUE(target.holds(5, 0, kServedBytes));

  NicBlock echo(*end.nic, 4096);
  ASSERT_TRUE(end.nic->receive(echo.all(), tagOf(3)).ok());
  ASSERT_TRUE(end.nic->send(server.peer, source.at(0, 16), source.at(16, 1000), tagOf(4)).ok());
  ASSERT_TRUE(until([&] { return end.done.size() == 2; }));
  EXPECT_TRUE(echo.holds(5, 0, 1016));
  EXPECT_EQ(server.process->finish(), 0);
}

// All operations to a killed peer end, those under way and later ones. Other peers do not notice.
TEST_P(LibfabricProcesses, AKilledPeerFailsWhatIsUnderWayAndNobodyElse) {
  Server victim, survivor;
  start(victim);
  start(survivor);
  ASSERT_TRUE(writeWorks(survivor) && writeWorks(victim));
  NicBlock block(*end.nic, kServedBytes);
  std::set<void*> underWay;
  uintptr_t number = 1000;
  const auto fill = [&] {
    while (underWay.size() < 64) {
      void* tag = tagOf(++number);
      Status status;
      switch (number % 3) {
        case 0:
          status = end.nic->write(victim.peer, block.all(), victim.key, 0, tag);
          break;
        case 1:
          status = end.nic->read(victim.peer, block.all(), victim.key, 0, tag);
          break;
        default:
          status = end.nic->send(victim.peer, block.at(0, 64), block.at(64, 64), tag);
      }
      if (!status.ok()) break;
      underWay.insert(tag);
    }
  };
  const auto drain = [&](size_t& failures) {
    for (const NicCompletion& one : end.done) {
      EXPECT_EQ(underWay.erase(one.context), 1u);
      if (one.error == NicError::kNone) continue;
      ++failures;
      EXPECT_EQ(one.error, NicError::kUnreachable);
    }
    end.done.clear();
  };
  size_t failures = 0, rounds = 0;
  while (rounds++ < 20) {
    fill();
    ASSERT_TRUE(until([&] { return !end.done.empty(); }));
    drain(failures);
  }
  fill();
  ASSERT_EQ(failures, 0u);
  ::kill(victim.process->pid(), SIGKILL);
  const auto killed = Clock::now();
  ASSERT_TRUE(until([&] {
    drain(failures);
    return underWay.empty();
  })) << underWay.size()
      << " never ended";
  EXPECT_LT(Clock::now() - killed, 4 * kTimeout + std::chrono::seconds(1));
  EXPECT_GT(failures, 0u);
  for (int i = 0; i < 3; ++i) {
    const auto began = Clock::now();
    EXPECT_FALSE(writeWorks(victim));
    EXPECT_LT(Clock::now() - began, 4 * kTimeout + std::chrono::seconds(1));
    EXPECT_TRUE(writeWorks(survivor));
  }
  EXPECT_EQ(survivor.process->finish(), 0);
}

// A peer is stopped, then goes on. Operations that were given up stay so; their late completions
// are dropped.
TEST_P(LibfabricProcesses, AStoppedPeerIsGivenUpAndItsLateCompletionsAreNobodys) {
  Server server;
  start(server);
  ASSERT_TRUE(writeWorks(server));
  ::kill(server.process->pid(), SIGSTOP);
  // The process runs on for a moment after the signal was sent.
  ASSERT_TRUE(until([&] {
    siginfo_t stopped{};
    ::waitid(P_PID, id_t(server.process->pid()), &stopped, WSTOPPED | WNOWAIT | WNOHANG);
    return stopped.si_pid == server.process->pid();
  }));
  NicBlock block(*end.nic, kServedBytes);
  std::set<void*> underWay;
  for (uintptr_t i = 1; i <= 40; ++i) {
    ASSERT_TRUE(end.nic->read(server.peer, block.all(), server.key, 0, tagOf(i)).ok());
    underWay.insert(tagOf(i));
  }
  ASSERT_TRUE(until([&] { return end.done.size() >= underWay.size(); }));
  for (const NicCompletion& one : end.done) {
    EXPECT_EQ(underWay.erase(one.context), 1u);
    EXPECT_EQ(one.error, NicError::kUnreachable);
    EXPECT_TRUE(one.abandoned);
  }
  end.done.clear();
  ::kill(server.process->pid(), SIGCONT);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(writeWorks(server));
  end.poll();
  EXPECT_TRUE(end.done.empty());
  // Their places are free again.
  size_t begun = 0;
  ASSERT_TRUE(until([&] {
    while (end.nic->write(server.peer, block.at(0, 64), server.key, 0, tagOf(5)).ok()) ++begun;
    return begun >= end.nic->limits().sendDepth;
  }));
  EXPECT_TRUE(until([&] { return end.done.size() >= begun; }));
  EXPECT_EQ(server.process->finish(), 0);
}

INSTANTIATE_TEST_SUITE_P(TcpRxm, LibfabricProcesses,
                         ::testing::Values(std::pair("tcp;ofi_rxm", "127.0.0.1")));
INSTANTIATE_TEST_SUITE_P(Sockets, LibfabricProcesses,
                         ::testing::Values(std::pair("sockets", "127.0.0.1")));

}  // namespace
}  // namespace mooncake::testing
