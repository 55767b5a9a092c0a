#include "base/env.h"

#include <algorithm>
#include <cstdlib>
#include <gtest/gtest.h>
#include <map>
#include <thread>

#include "base/fabric_env.h"
#include "base/transfer_env.h"

namespace mooncake {
namespace {

// Starts without any of our variables and puts the environment back afterwards.
class EnvTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const auto& variable : envTable()) {
      if (const char* value = std::getenv(variable.name)) before_[variable.name] = value;
      ::unsetenv(variable.name);
    }
  }
  void TearDown() override {
    for (const auto& variable : envTable()) ::unsetenv(variable.name);
    for (const auto& [name, value] : before_) set(name, value);
  }
  static void set(const std::string& name, const std::string& value) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }

 private:
  std::map<std::string, std::string> before_;
};

bool same(const Env& a, const Env& b) {
  return a.transports == b.transports && a.hostIp == b.hostIp && a.jobKey == b.jobKey &&
         a.failureTimeout == b.failureTimeout && a.tcpConnections == b.tcpConnections &&
         a.eagerBytes == b.eagerBytes && a.crossMemoryAttach == b.crossMemoryAttach &&
         a.raises == b.raises && a.logLevel == b.logLevel && a.simSeed == b.simSeed &&
         a.waitsFile == b.waitsFile;
}

bool same(const TransferEnv& a, const TransferEnv& b) {
  return a.timeout == b.timeout && a.sessionTimeout == b.sessionTimeout &&
         a.leastRpcPort == b.leastRpcPort && a.mostRpcPort == b.mostRpcPort &&
         a.tcpBindAddress == b.tcpBindAddress && a.usesGivenRpcPort == b.usesGivenRpcPort &&
         a.mostTransfers == b.mostTransfers && a.tcpIoThreads == b.tcpIoThreads &&
         a.metadataCluster == b.metadataCluster && a.forcesTcp == b.forcesTcp &&
         a.allowsFallback == b.allowsFallback;
}

bool same(const FabricEnv& a, const FabricEnv& b) {
  return a.libfabricPath == b.libfabricPath && a.providers == b.providers &&
         a.requiredProvider == b.requiredProvider && a.devices == b.devices &&
         a.excludedDevices == b.excludedDevices && a.timeout == b.timeout &&
         a.mostUnderWay == b.mostUnderWay && a.mostMemoryBytes == b.mostMemoryBytes &&
         a.selection == b.selection && a.pollThreads == b.pollThreads &&
         a.stripingThreshold == b.stripingThreshold && a.topologyPath == b.topologyPath;
}

const std::map<std::string, std::string> kGood = {
    {"MOONCAKE_TRANSPORTS", "tcp,cuda_ipc"},
    {"MOONCAKE_HOST_IP", "10.1.2.3"},
    {"MOONCAKE_JOB_KEY", "a secret of the job"},
    {"MOONCAKE_FAILURE_TIMEOUT_MS", "250"},
    {"MOONCAKE_ON_FAILURE", "raise"},
    {"MOONCAKE_TCP_CONNECTIONS", "8"},
    {"MOONCAKE_EAGER_BYTES", "4096"},
    {"MOONCAKE_CMA", "0"},
    {"MOONCAKE_LOG_LEVEL", "debug"},
    {"MOONCAKE_SIM_SEED", "7"},
    {"TORCHELASTIC_ERROR_FILE", "/logs/2/error.json"},
    {"MC_TRANSFER_TIMEOUT", "60"},
    {"MC_HANDSHAKE_CONNECT_TIMEOUT", "2"},
    {"MC_MIN_RPC_PORT", "20000"},
    {"MC_MAX_RPC_PORT", "21000"},
    {"MC_MIN_PRC_PORT", "20000"},
    {"MC_MAX_PRC_PORT", "21000"},
    {"MC_TCP_BIND_ADDRESS", "10.1.2.3"},
    {"MC_LEGACY_RPC_PORT_BINDING", "1"},
    {"MC_TCP_MAX_CONNECTIONS", "128"},
    {"MC_NUM_TCP_IO_THREADS", "4"},
    {"MC_METADATA_CLUSTER_ID", "prod"},
    {"MC_FORCE_TCP", "1"},
    {"MOONCAKE_ALLOW_FALLBACK", "1"},
    {"MOONCAKE_LIBFABRIC", "/opt/libfabric.so.1"},
    {"MOONCAKE_FABRIC_PROVIDERS", "tcp;ofi_rxm,sockets"},
    {"MOONCAKE_FABRIC_REQUIRE", "efa"},
    {"MC_TE_FILTERS", "rdmap79s0,rdmap80s0"},
    {"MC_TE_FILTERS_EXCLUDE", "rdmap80s0"},
    {"MOONCAKE_NIC_TIMEOUT_MS", "100"},
    {"MC_MAX_WR", "256"},
    {"MC_MAX_MR_SIZE", "1073741824"},
    {"MC_EFA_NIC_SELECTION", "local"},
    {"MC_EFA_CQ_THREADS", "0"},
    {"MC_EFA_STRIPING_THRESHOLD", "0"},
    {"MC_CUSTOM_TOPO_JSON", "/etc/topology.json"},
};

TEST_F(EnvTest, ReadsExactlyTheVariablesOfTheTable) {
  ASSERT_EQ(envTable().size(), kGood.size());
  const Env usual = *Env::read();
  const TransferEnv usualTransferEnv = *TransferEnv::read();
  for (const auto& variable : envTable()) {
    ASSERT_TRUE(kGood.contains(variable.name)) << variable.name;
    set(variable.name, kGood.at(variable.name));
    const auto env = Env::read();
    const auto transferEnv = TransferEnv::read();
    ASSERT_TRUE(env.ok()) << env.error().message;
    ASSERT_TRUE(transferEnv.ok()) << transferEnv.error().message;
    const auto fabricEnv = FabricEnv::read();
    ASSERT_TRUE(fabricEnv.ok()) << fabricEnv.error().message;
    EXPECT_FALSE(same(*env, usual) && same(*transferEnv, usualTransferEnv) &&
                 same(*fabricEnv, FabricEnv()))
        << variable.name << " changes nothing";
    ::unsetenv(variable.name);
    EXPECT_STRNE(variable.meaning, "");
  }
}

TEST_F(EnvTest, ReadsTheValues) {
  for (const auto& [name, value] : kGood) set(name, value);
  const auto env = Env::read();
  ASSERT_TRUE(env.ok()) << env.error().message;
  EXPECT_EQ(env->transports, (std::vector<std::string>{"tcp", "cuda_ipc"}));
  EXPECT_EQ(env->hostIp, "10.1.2.3");
  EXPECT_EQ(env->jobKey, "a secret of the job");
  EXPECT_EQ(env->failureTimeout, std::chrono::milliseconds(250));
  EXPECT_TRUE(env->raises);
  EXPECT_EQ(env->tcpConnections, 8u);
  EXPECT_EQ(env->eagerBytes, 4096u);
  EXPECT_FALSE(env->crossMemoryAttach);
  EXPECT_EQ(env->logLevel, "debug");
  EXPECT_EQ(env->waitsFile, "/logs/2/waits.txt");
  const auto transferEnv = TransferEnv::read();
  ASSERT_TRUE(transferEnv.ok()) << transferEnv.error().message;
  EXPECT_EQ(transferEnv->timeout, std::chrono::seconds(60));
  EXPECT_EQ(transferEnv->leastRpcPort, 20000);
  EXPECT_EQ(transferEnv->mostRpcPort, 21000);
  const auto fabricEnv = FabricEnv::read();
  ASSERT_TRUE(fabricEnv.ok()) << fabricEnv.error().message;
  EXPECT_EQ(fabricEnv->providers, (std::vector<std::string>{"tcp;ofi_rxm", "sockets"}));
  EXPECT_EQ(fabricEnv->devices, (std::vector<std::string>{"rdmap79s0", "rdmap80s0"}));
  EXPECT_EQ(fabricEnv->selection, NicSelection::kLocal);
}

TEST_F(EnvTest, WhatCardsDoNotTakeIsNoErrorOfOthers) {
  for (const auto& [name, value] :
       std::map<std::string, std::string>{{"MOONCAKE_LIBFABRIC", "libfabric.so"},
                                          {"MOONCAKE_FABRIC_PROVIDERS", "efa,,sockets"},
                                          {"MOONCAKE_FABRIC_REQUIRE", "efa,sockets"},
                                          {"MC_TE_FILTERS", ","},
                                          {"MC_EFA_NIC_SELECTION", "some"},
                                          {"MC_MAX_MR_SIZE", "1"}}) {
    set(name, value);
    const auto env = FabricEnv::read();
    ASSERT_FALSE(env.ok()) << name;
    EXPECT_NE(env.error().message.find(name + "=\"" + value), std::string::npos);
    EXPECT_TRUE(Env::read().ok());
    ::unsetenv(name.c_str());
  }
}

TEST_F(EnvTest, ThreadsForTcpAreAsThereAreCoresUnlessTold) {
  const size_t cores = std::thread::hardware_concurrency();
  EXPECT_EQ(TransferEnv::read()->tcpIoThreads, std::clamp<size_t>(cores, 1, 8));
  EXPECT_EQ(TransferEnv::read()->mostTransfers, 64u);
  set("MC_NUM_TCP_IO_THREADS", "0");
  EXPECT_EQ(TransferEnv::read()->tcpIoThreads, std::clamp<size_t>(cores, 1, 8));
  set("MC_NUM_TCP_IO_THREADS", "9");
  EXPECT_EQ(TransferEnv::read()->tcpIoThreads, 9u);
}

TEST_F(EnvTest, WhatATransferEngineDoesNotTakeIsNoErrorOfOthers) {
  for (const auto& [name, value] : std::map<std::string, std::string>{
           {"MC_MIN_RPC_PORT", "0"}, {"MC_MAX_RPC_PORT", "65536"}, {"MC_FORCE_TCP", "yes"}}) {
    set(name, value);
    const auto env = TransferEnv::read();
    ASSERT_FALSE(env.ok()) << name;
    EXPECT_NE(env.error().message.find(name + "=\"" + value), std::string::npos);
    EXPECT_TRUE(Env::read().ok());
    ::unsetenv(name.c_str());
  }
}

TEST_F(EnvTest, ATransferHasFiveSecondsAtLeast) {
  set("MC_TRANSFER_TIMEOUT", "1");
  EXPECT_EQ(TransferEnv::read()->timeout, std::chrono::seconds(5));
}

TEST_F(EnvTest, TheDefaultsOfTheTableAreThoseOfTheStruct) {
  EXPECT_TRUE(same(*Env::read(), Env()));
  for (const auto& variable : envTable()) set(variable.name, variable.defaultValue);
  const auto env = Env::read();
  ASSERT_TRUE(env.ok()) << env.error().message;
  EXPECT_TRUE(same(*env, Env())) << "and an empty value is like none";
}

TEST_F(EnvTest, ErrorsNameVariableValueAndWhatIsAllowed) {
  const std::multimap<std::string, std::string> bad = {
      {"MOONCAKE_TRANSPORTS", "tcp,"},
      {"MOONCAKE_TRANSPORTS", "tcp,tcp"},
      {"MOONCAKE_TRANSPORTS", "TCP"},
      {"MOONCAKE_HOST_IP", "myhost"},
      {"MOONCAKE_FAILURE_TIMEOUT_MS", "3s"},
      {"MOONCAKE_FAILURE_TIMEOUT_MS", "-1"},
      {"MOONCAKE_FAILURE_TIMEOUT_MS", "9"},
      {"MOONCAKE_ON_FAILURE", "perhaps"},
      {"MOONCAKE_TCP_CONNECTIONS", "0"},
      {"MOONCAKE_TCP_CONNECTIONS", "65"},
      {"MOONCAKE_EAGER_BYTES", "99999999999999999999999"},
      {"MOONCAKE_CMA", "yes"},
      {"MOONCAKE_LOG_LEVEL", "verbose"},
  };
  for (const auto& [name, value] : bad) {
    set(name, value);
    const auto env = Env::read();
    ASSERT_FALSE(env.ok()) << name << "=" << value;
    EXPECT_EQ(env.error().code, ErrorCode::kInvalidArgument);
    for (const std::string& part : {name, value, std::string("allowed: ")}) {
      EXPECT_NE(env.error().message.find(part), std::string::npos) << env.error().message;
    }
    ::unsetenv(name.c_str());
  }
}

TEST_F(EnvTest, AShortKeyIsRefusedAndStandsInNoMessage) {
  set("MOONCAKE_JOB_KEY", "fifteen letters");
  const auto env = Env::read();
  ASSERT_FALSE(env.ok());
  EXPECT_EQ(env.error().code, ErrorCode::kInvalidArgument);
  for (const char* part : {"MOONCAKE_JOB_KEY", "has 15 bytes", "16 bytes or more"})
    EXPECT_NE(env.error().message.find(part), std::string::npos) << env.error().message;
  EXPECT_EQ(env.error().message.find("fifteen"), std::string::npos) << env.error().message;
}

}  // namespace
}  // namespace mooncake
