// A process with peers has stopped: the others get their packets, before and after an eviction.
#include <csignal>
#include <deque>

#include "child_process.h"
#include "wire_end.h"
#include "wires/fabric/libfabric_transport.h"
#include "wires/nic/libfabric/cards.h"
#include "wires/sim/sim_transport.h"
#include "wires/tcp/tcp_transport.h"

namespace mooncake::testing {
namespace {

constexpr size_t kPeers = 8;  // in one process
constexpr size_t kPart = size_t(2) << 20;
constexpr size_t kPut = 8192;

struct SilentSim {
  static constexpr const char* kName = "FabricSilentSim";
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return createSimTransport(context, TcpTransport::create,
                              {.cards = 1,
                               .odds = {.failed = 0, .late = 0, .lost = 0, .storm = 0, .death = 0},
                               .breakOdds = 0});
  }
};
struct SilentTcpRxm {
  static constexpr const char* kName = "FabricSilentTcpRxm";
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    FabricEnv env;
    env.requiredProvider = "tcp;ofi_rxm";
    env.devices = {"127.0.0.1"};
    return createLibfabricTransport(context, TcpTransport::create, env);
  }
};

template <typename Wire>
struct Silent : WireEnd {
  Silent() : WireEnd(onLoopback(), Wire::create) {}
};

// In the child: peers that take all packets until the process is stopped.
template <typename Wire>
void serve() {
  if (!ChildProcess::isChild()) GTEST_SKIP() << "a child of another test";
  std::deque<Silent<Wire>> ends(kPeers);
  std::deque<Part> parts;
  for (auto& end : ends) {
    const auto region = parts.emplace_back(end.part(kPart)).remote();
    ByteWriter out;
    out.putRaw(end.id()).put(region.address).put(region.bytes).put(region.key);
    sendMessage(ChildProcess::kToParent, out.putBytes(end.transport->endpoint()).take());
  }
  receiveMessage(ChildProcess::kFromParent);
}
TEST(FabricSilentSim, DISABLED_Serve) { serve<SilentSim>(); }
TEST(FabricSilentTcpRxm, DISABLED_Serve) { serve<SilentTcpRxm>(); }

// The channels to the peers of one process, which is stopped.
template <typename Wire>
class StoppedPeers {
 public:
  explicit StoppedPeers(Silent<Wire>& from) : child_(std::string(Wire::kName) + ".DISABLED_Serve") {
    for (size_t i = 0; i < kPeers; ++i) {
      const Bytes said = child_.receive();
      ByteReader in(said);
      EngineId id;
      const auto raw = in.getRaw(id.size());
      EXPECT_EQ(raw.size(), id.size());
      if (raw.size() != id.size()) return;
      std::ranges::copy(raw, id.begin());
      auto& region = regions_.emplace_back();
      region.address = in.get<uint64_t>();
      region.bytes = in.get<uint64_t>();
      region.key = in.get<uint64_t>();
      const ByteView endpoint = in.getBytes(4096);
      auto connected = connectNow(*from.transport, id, endpoint, Deadline::after(kPatience));
      EXPECT_TRUE(connected.ok());
      if (!connected.ok()) return;
      channels_.push_back(std::static_pointer_cast<FabricChannel>(*connected));
      Completion reached(&bell_);
      Bytes target(64);
      EXPECT_TRUE(channels_.back()->get({region, 0, target, &reached}).ok());
      EXPECT_EQ(endOf(reached), ErrorCode::kOk);
    }
    ::kill(child_.pid(), SIGSTOP);
  }
  ~StoppedPeers() {
    for (const auto& channel : channels_) channel->close();
  }

  // Puts more than the window of a channel, and more than its share of any resource.
  void putToAll() {
    const Bytes data(kPut);
    for (size_t i = 0; i < channels_.size(); ++i) {
      for (uint64_t number = 1; number <= 600; ++number) {
        const Signal signal{kWord, stampOf(++lastStamp_)};
        ASSERT_TRUE(channels_[i]->put({regions_[i], kData, data, signal}).ok());
      }
    }
  }
  void fence() {
    for (const auto& channel : channels_) channel->fence();
  }
  size_t unacknowledged() const {
    size_t sum = 0;
    for (const auto& channel : channels_) sum += channel->unacknowledged();
    return sum;
  }

 private:
  Doorbell bell_;
  ChildProcess child_;
  uint64_t lastStamp_ = 0;
  std::vector<RemoteRegion> regions_;
  std::vector<std::shared_ptr<FabricChannel>> channels_;
};

template <typename Wire>
class FabricSilentPeers : public ConnectedTest {
 protected:
  void SetUp() override { connect(hub, healthy); }

  // Puts both ways and gets, in sequence.
  void expectService() {
    for (int i = 0; i < 10; ++i) {
      ++number_;
      ASSERT_NO_FATAL_FAILURE(expectPutArrives(*toB, atHealthy, number_, 50'000));
      ASSERT_NO_FATAL_FAILURE(expectPutArrives(*toA, atHub, number_, 50'000));
      Bytes target(100'000);
      Completion mine(&bell), theirs(&bell);
      ASSERT_TRUE(toB->get({atHealthy.remote(), 0, target, &mine}).ok());
      EXPECT_EQ(endOf(mine), ErrorCode::kOk);
      ASSERT_TRUE(toA->get({atHub.remote(), 0, target, &theirs}).ok());
      EXPECT_EQ(endOf(theirs), ErrorCode::kOk);
    }
  }

  Silent<Wire> hub, healthy;
  Part atHub = hub.part(kPart), atHealthy = healthy.part(kPart);
  uint64_t number_ = 0;
};

using Wires = ::testing::Types<SilentSim, SilentTcpRxm>;
TYPED_TEST_SUITE(FabricSilentPeers, Wires);

TYPED_TEST(FabricSilentPeers, TakeNothingFromTheOthers) {
  this->expectService();
  StoppedPeers<TypeParam> first(this->hub);
  ASSERT_NO_FATAL_FAILURE(first.putToAll());
  EXPECT_GT(first.unacknowledged(), 0u);
  ASSERT_NO_FATAL_FAILURE(this->expectService());
  first.fence();
  EXPECT_EQ(first.unacknowledged(), 0u);
  ASSERT_NO_FATAL_FAILURE(first.putToAll());
  EXPECT_EQ(first.unacknowledged(), 0u) << "a fenced peer gets nothing";
  StoppedPeers<TypeParam> second(this->hub);
  ASSERT_NO_FATAL_FAILURE(second.putToAll());
  ASSERT_NO_FATAL_FAILURE(this->expectService());
  EXPECT_EQ(this->hub.endedCount(), 0u) << "a peer that is silent has not ended";
}

}  // namespace
}  // namespace mooncake::testing
