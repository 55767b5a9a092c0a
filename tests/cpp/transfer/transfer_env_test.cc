#include "transfer/transfer_env.h"

#include <algorithm>
#include <thread>

#include "engine/env.h"
#include "env_suite.h"

namespace mooncake {
namespace {

bool areSame(const TransferEnv& a, const TransferEnv& b) {
  return a.timeout == b.timeout && a.sessionTimeout == b.sessionTimeout &&
         a.leastRpcPort == b.leastRpcPort && a.mostRpcPort == b.mostRpcPort &&
         a.tcpBindAddress == b.tcpBindAddress && a.usesGivenRpcPort == b.usesGivenRpcPort &&
         a.mostTransfers == b.mostTransfers && a.tcpIoThreads == b.tcpIoThreads &&
         a.metadataCluster == b.metadataCluster && a.forcesTcp == b.forcesTcp &&
         a.allowsFallback == b.allowsFallback;
}

class TransferEnvTest : public test::EnvTest<TransferEnv> {};

const test::Values kGood = {
    {"MC_TRANSFER_TIMEOUT", "60"},       {"MC_HANDSHAKE_CONNECT_TIMEOUT", "2"},
    {"MC_MIN_RPC_PORT", "20000"},        {"MC_MAX_RPC_PORT", "21000"},
    {"MC_MIN_PRC_PORT", "20000"},        {"MC_MAX_PRC_PORT", "21000"},
    {"MC_TCP_BIND_ADDRESS", "10.1.2.3"}, {"MC_LEGACY_RPC_PORT_BINDING", "1"},
    {"MC_TCP_MAX_CONNECTIONS", "128"},   {"MC_NUM_TCP_IO_THREADS", "13"},
    {"MC_METADATA_CLUSTER_ID", "prod"},  {"MC_FORCE_TCP", "1"},
    {"MOONCAKE_ALLOW_FALLBACK", "1"},
};

TEST_F(TransferEnvTest, ReadsExactlyTheVariablesOfTheTable) { expectExactly(kGood, areSame); }

TEST_F(TransferEnvTest, ReadsTheValues) {
  set(kGood);
  const auto env = TransferEnv::read();
  ASSERT_TRUE(env.ok()) << env.error().message;
  EXPECT_EQ(env->timeout, std::chrono::seconds(60));
  EXPECT_EQ(env->leastRpcPort, 20000);
  EXPECT_EQ(env->mostRpcPort, 21000);
}

TEST_F(TransferEnvTest, TheDefaultsOfTheTableAreThoseOfTheStruct) {
  TransferEnv usual;
  usual.tcpIoThreads = TransferEnv::read()->tcpIoThreads;
  EXPECT_TRUE(areSame(*TransferEnv::read(), usual));
  expectDefaults(areSame);
}

TEST_F(TransferEnvTest, ThreadsForTcpAreAsThereAreCoresUnlessTold) {
  const size_t cores = std::thread::hardware_concurrency();
  EXPECT_EQ(TransferEnv::read()->tcpIoThreads, std::clamp<size_t>(cores, 1, 8));
  set("MC_NUM_TCP_IO_THREADS", "0");
  EXPECT_EQ(TransferEnv::read()->tcpIoThreads, std::clamp<size_t>(cores, 1, 8));
  set("MC_NUM_TCP_IO_THREADS", "9");
  EXPECT_EQ(TransferEnv::read()->tcpIoThreads, 9u);
}

TEST_F(TransferEnvTest, WhatATransferEngineDoesNotTakeIsNoErrorOfOthers) {
  for (const auto& [name, value] : test::Values{
           {"MC_MIN_RPC_PORT", "0"}, {"MC_MAX_RPC_PORT", "65536"}, {"MC_FORCE_TCP", "yes"}}) {
    expectRefused(name, value);
    set(name, value);
    EXPECT_TRUE(EngineEnv::read().ok());
    unset(name);
  }
}

TEST_F(TransferEnvTest, ATransferHasFiveSecondsAtLeast) {
  set("MC_TRANSFER_TIMEOUT", "1");
  EXPECT_EQ(TransferEnv::read()->timeout, std::chrono::seconds(5));
}

}  // namespace
}  // namespace mooncake
