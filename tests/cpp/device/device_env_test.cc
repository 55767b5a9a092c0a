#include "device/device_env.h"

#include "env_suite.h"

namespace mooncake {
namespace {

class DeviceEnvTest : public test::EnvTest<DeviceEnv> {};

bool areSame(const DeviceEnv& a, const DeviceEnv& b) {
  return a.peerMemory == b.peerMemory && a.streamPriority == b.streamPriority;
}

TEST_F(DeviceEnvTest, ReadsItsVariables) {
  expectExactly({{"MOONCAKE_PEER_MEMORY", "4096"}, {"MOONCAKE_STREAM_PRIORITY", "high"}}, areSame);
  expectDefaults(areSame);
}

TEST_F(DeviceEnvTest, RefusesOtherValuesByName) {
  expectRefused("MOONCAKE_PEER_MEMORY", "16G");
  expectRefused("MOONCAKE_STREAM_PRIORITY", "low");
}

}  // namespace
}  // namespace mooncake
