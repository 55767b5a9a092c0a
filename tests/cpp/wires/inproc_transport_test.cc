#include "wires/inproc/inproc_transport.h"

#include <atomic>
#include <thread>

#include "engine/memory/gate.h"
#include "transport_suite.h"

namespace mooncake::testing {
namespace {

struct Inproc {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return InprocTransport::create(context);
  }
  static EngineEnv env() { return {}; }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Inproc, TransportSuite, Inproc);

struct InprocEnd : WireEnd {
  InprocEnd() : WireEnd({}, InprocTransport::create) {}
};

std::shared_ptr<Channel> connectOrDie(const InprocEnd& from, const InprocEnd& to) {
  auto channel = connectNow(from, to);
  EXPECT_TRUE(channel.ok());
  return *channel;
}

ErrorCode get(Channel& channel, const RemoteRegion& region, std::span<std::byte> target) {
  Doorbell bell;
  Completion completion(&bell);
  const Status begun = channel.get({region, 0, target, &completion});
  if (!begun.ok()) return begun.code();
  return endOf(completion);
}

TEST(Inproc, ReadsUserMemoryWhileItIsRegistered) {
  InprocEnd a, b;
  const auto toB = connectOrDie(a, b);
  Bytes memory = pattern(100000, 1), target(100000);
  auto region = b.regions().add(memory.data(), memory.size(), kRemoteRead);
  ASSERT_TRUE(region.ok());
  const RemoteRegion remote = region->remote();
  EXPECT_EQ(get(*toB, remote, target), ErrorCode::kOk);
  EXPECT_EQ(target, memory);
  *region = MemoryRegion();
  EXPECT_EQ(get(*toB, remote, target), ErrorCode::kRefused);
}

// The reader follows pointers into the other engine. Under the sanitizers this shows that it never
// does so after the engine's end.
TEST(Inproc, AnEngineMayEndWhileItIsRead) {
  InprocEnd a;
  for (int round = 0; round < 20; ++round) {
    auto b = std::make_unique<InprocEnd>();
    const auto toB = connectOrDie(a, *b);
    auto memory = std::make_unique<Bytes>(pattern(1 << 16, 2));
    auto region = b->regions().add(memory->data(), memory->size(), kRemoteRead);
    ASSERT_TRUE(region.ok());
    std::atomic<int> reads{0};
    std::thread reader([&, remote = region->remote()] {
      Bytes target(1 << 16);
      while (get(*toB, remote, target) == ErrorCode::kOk) reads.fetch_add(1);
    });
    EXPECT_TRUE(eventually([&] { return reads.load() > 10; }));
    *region = MemoryRegion();
    memory.reset();
    b.reset();
    reader.join();
    toB->close();
  }
}

TEST(Inproc, DoesNotLeadToAnotherProcess) {
  InprocEnd a, b;
  Bytes endpoint = b.transport->endpoint();
  endpoint[0] ^= std::byte(1);  // another process
  const auto result = connectNow(*a.transport, b.id(), endpoint, Deadline::after(kPatience));
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code, ErrorCode::kUnsupported);
}

TEST(Gate, ClosesWhenTheLastOneLeft) {
  Gate gate;
  std::atomic<int> inside{0};
  std::atomic<bool> closed{false};
  std::vector<std::thread> users;
  for (int i = 0; i < 3; ++i) {
    users.emplace_back([&] {
      for (;;) {
        const Gate::Pass pass(gate);
        if (!pass) return;
        inside.fetch_add(1);
        EXPECT_FALSE(closed.load());
        inside.fetch_sub(1);
      }
    });
  }
  gate.close();
  EXPECT_EQ(inside.load(), 0);
  closed.store(true);
  for (auto& user : users) user.join();
  EXPECT_FALSE(gate.enter());
}

TEST(Gate, ZerosAreClosed) {
  alignas(Gate) std::byte zeros[sizeof(Gate)] = {};
  EXPECT_FALSE(reinterpret_cast<Gate*>(zeros)->enter());
}

}  // namespace
}  // namespace mooncake::testing
