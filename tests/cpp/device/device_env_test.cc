#include "device/device_env.h"

#include "env_suite.h"

namespace mooncake {
namespace {

class DeviceEnvTest : public test::EnvTest<DeviceEnv> {};

TEST_F(DeviceEnvTest, ReadsTheLimitOfPeerMemory) {
  const auto areSame = [](const DeviceEnv& a, const DeviceEnv& b) {
    return a.peerMemory == b.peerMemory;
  };
  expectExactly({{"MOONCAKE_PEER_MEMORY", "4096"}}, areSame);
  expectDefaults(areSame);
  expectRefused("MOONCAKE_PEER_MEMORY", "16G");
}

}  // namespace
}  // namespace mooncake
