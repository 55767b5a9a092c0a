#include "wires/nic/fabric_env.h"

#include "engine/env.h"
#include "env_suite.h"

namespace mooncake {
namespace {

bool areSame(const FabricEnv& a, const FabricEnv& b) {
  return a.libfabricPath == b.libfabricPath && a.providers == b.providers &&
         a.requiredProvider == b.requiredProvider && a.devices == b.devices &&
         a.excludedDevices == b.excludedDevices && a.timeout == b.timeout &&
         a.mostUnderWay == b.mostUnderWay && a.mostMemoryBytes == b.mostMemoryBytes &&
         a.selection == b.selection && a.pollThreads == b.pollThreads &&
         a.stripingThreshold == b.stripingThreshold && a.topologyPath == b.topologyPath;
}

class FabricEnvTest : public test::EnvTest<FabricEnv> {};

const test::Values kGood = {
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

TEST_F(FabricEnvTest, ReadsExactlyTheVariablesOfTheTable) { expectExactly(kGood, areSame); }

TEST_F(FabricEnvTest, ReadsTheValues) {
  set(kGood);
  const auto env = FabricEnv::read();
  ASSERT_TRUE(env.ok()) << env.error().message;
  EXPECT_EQ(env->providers, (std::vector<std::string>{"tcp;ofi_rxm", "sockets"}));
  EXPECT_EQ(env->devices, (std::vector<std::string>{"rdmap79s0", "rdmap80s0"}));
  EXPECT_EQ(env->selection, NicSelection::kLocal);
}

TEST_F(FabricEnvTest, TheDefaultsOfTheTableAreThoseOfTheStruct) {
  EXPECT_TRUE(areSame(*FabricEnv::read(), FabricEnv()));
  expectDefaults(areSame);
}

TEST_F(FabricEnvTest, WhatCardsDoNotTakeIsNoErrorOfOthers) {
  for (const auto& [name, value] : test::Values{{"MOONCAKE_LIBFABRIC", "libfabric.so"},
                                                {"MOONCAKE_FABRIC_PROVIDERS", "efa,,sockets"},
                                                {"MOONCAKE_FABRIC_REQUIRE", "efa,sockets"},
                                                {"MC_TE_FILTERS", ","},
                                                {"MC_EFA_NIC_SELECTION", "some"},
                                                {"MC_MAX_MR_SIZE", "1"}}) {
    expectRefused(name, value);
    set(name, value);
    EXPECT_TRUE(EngineEnv::read().ok());
    unset(name);
  }
}

}  // namespace
}  // namespace mooncake
