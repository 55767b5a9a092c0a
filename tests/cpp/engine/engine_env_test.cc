#include "base/log_env.h"
#include "engine/env.h"
#include "env_suite.h"

namespace mooncake {
namespace {

bool areSame(const EngineEnv& a, const EngineEnv& b) {
  return a.transports == b.transports && a.hostIp == b.hostIp && a.jobKey == b.jobKey &&
         a.failureTimeout == b.failureTimeout && a.tcpConnections == b.tcpConnections &&
         a.crossMemoryAttach == b.crossMemoryAttach && a.mapsDeviceMemory == b.mapsDeviceMemory &&
         a.peerMessages == b.peerMessages && a.proxyThreads == b.proxyThreads &&
         a.arenaBytes == b.arenaBytes && a.simSeed == b.simSeed;
}

class EngineEnvTest : public test::EnvTest<EngineEnv> {};

const test::Values kGood = {
    {"MOONCAKE_TRANSPORTS", "tcp,cuda_ipc"},
    {"MOONCAKE_HOST_IP", "10.1.2.3"},
    {"MOONCAKE_JOB_KEY", "a secret of the job"},
    {"MOONCAKE_FAILURE_TIMEOUT_MS", "250"},
    {"MOONCAKE_TCP_CONNECTIONS", "8"},
    {"MOONCAKE_CMA", "0"},
    {"MOONCAKE_CUDA_IPC", "1"},
    {"MOONCAKE_PEER_MESSAGES", "1048576"},
    {"MOONCAKE_PROXY_THREADS", "3"},
    {"MOONCAKE_ARENA_BYTES", "67108864"},
    {"MOONCAKE_SIM_SEED", "7"},
};

TEST_F(EngineEnvTest, ReadsExactlyTheVariablesOfTheTable) { expectExactly(kGood, areSame); }

TEST_F(EngineEnvTest, ReadsTheValues) {
  set(kGood);
  const auto env = EngineEnv::read();
  ASSERT_TRUE(env.ok()) << env.error().message;
  EXPECT_EQ(env->transports, (std::vector<std::string>{"tcp", "cuda_ipc"}));
  EXPECT_EQ(env->hostIp, "10.1.2.3");
  EXPECT_EQ(env->jobKey, "a secret of the job");
  EXPECT_EQ(env->failureTimeout, std::chrono::milliseconds(250));
  EXPECT_EQ(env->tcpConnections, 8u);
  EXPECT_FALSE(env->crossMemoryAttach);
  EXPECT_TRUE(env->mapsDeviceMemory);
  EXPECT_EQ(env->peerMessages, size_t{1} << 20);
  EXPECT_EQ(env->proxyThreads, 3u);
  EXPECT_EQ(env->arenaBytes, size_t{64} << 20);
  EXPECT_EQ(env->simSeed, 7u);
}

TEST_F(EngineEnvTest, TheDefaultsOfTheTableAreThoseOfTheStruct) {
  EXPECT_TRUE(areSame(*EngineEnv::read(), EngineEnv()));
  expectDefaults(areSame);
}

TEST_F(EngineEnvTest, ErrorsNameVariableValueAndWhatIsAllowed) {
  for (const char* value : {"tcp,", "tcp,tcp", "TCP", ",tcp"})
    expectRefused("MOONCAKE_TRANSPORTS", value);
  expectRefused("MOONCAKE_HOST_IP", "myhost");
  for (const char* value : {"3s", "-1", "9"}) expectRefused("MOONCAKE_FAILURE_TIMEOUT_MS", value);
  for (const char* value : {"0", "65"}) expectRefused("MOONCAKE_TCP_CONNECTIONS", value);
  expectRefused("MOONCAKE_CMA", "yes");
  expectRefused("MOONCAKE_CUDA_IPC", "yes");
  expectRefused("MOONCAKE_PEER_MESSAGES", "1M");
  expectRefused("MOONCAKE_PROXY_THREADS", "65");
  for (const char* value : {"64G", "67108863", "70368744177665"})
    expectRefused("MOONCAKE_ARENA_BYTES", value);
}

TEST_F(EngineEnvTest, AShortKeyIsRefusedAndStandsInNoMessage) {
  set("MOONCAKE_JOB_KEY", "fifteen letters");
  const auto env = EngineEnv::read();
  ASSERT_FALSE(env.ok());
  EXPECT_EQ(env.error().code, ErrorCode::kInvalidArgument);
  for (const char* part : {"MOONCAKE_JOB_KEY", "has 15 bytes", "16 bytes or more"})
    EXPECT_NE(env.error().message.find(part), std::string::npos) << env.error().message;
  EXPECT_EQ(env.error().message.find("fifteen"), std::string::npos) << env.error().message;
}

// The log cannot refuse its level itself.
class EnvOfTheLog : public test::EnvTest<LogEnv> {};

TEST_F(EnvOfTheLog, IsCheckedWithTheEngines) {
  set("MOONCAKE_LOG_LEVEL", "verbose");
  const auto env = EngineEnv::read();
  ASSERT_FALSE(env.ok());
  EXPECT_NE(env.error().message.find("MOONCAKE_LOG_LEVEL"), std::string::npos);
}

}  // namespace
}  // namespace mooncake
