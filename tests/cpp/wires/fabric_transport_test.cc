// Transport fabric over a provider that every machine has, on the loopback device.
#include "engine/engine.h"
#include "transport_suite.h"
#include "wires/fabric/libfabric_transport.h"
#include "wires/nic/libfabric/cards.h"
#include "wires/tcp/tcp_transport.h"

namespace mooncake::testing {
namespace {

FabricEnv onLoopbackOf(const char* provider) {
  FabricEnv env;
  env.requiredProvider = provider;
  env.devices = {"127.0.0.1"};
  return env;
}

struct FabricTcpRxm {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return createLibfabricTransport(context, TcpTransport::create, onLoopbackOf("tcp;ofi_rxm"));
  }
  static EngineEnv env() { return onLoopback(); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(FabricTcpRxm, TransportSuite, FabricTcpRxm);

TEST(FabricRegistry, OnlyWhenAskedFor) {
  EngineOptions options{.logName = "engine", .arenaBytes = size_t(1) << 30};
  options.env.hostIp = "127.0.0.1";
  options.jobKey = Bytes(32, std::byte{7});
  const auto engine = Engine::create(options);
  ASSERT_TRUE(engine.ok());
  const Bytes endpoint = (*engine)->endpoint(), name = bytesOf("fabric");
  EXPECT_EQ(std::search(endpoint.begin(), endpoint.end(), name.begin(), name.end()),
            endpoint.end());
}

TEST(FabricRegistry, AProviderThatIsNotThereIsAnError) {
  EngineSide side("the job's key", onLoopback());
  const auto none =
      createLibfabricTransport(side.context(), TcpTransport::create, onLoopbackOf("efa"));
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(none.error().message.find("efa"), std::string::npos) << none.error().message;
}

}  // namespace
}  // namespace mooncake::testing
