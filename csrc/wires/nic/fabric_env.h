#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/env.h"

namespace mooncake {

enum class NicSelection { kAll, kLocal };

struct EngineEnv;

// Settings of network cards, read when an engine opens some.
struct FabricEnv {
  std::string libfabricPath;                                   // MOONCAKE_LIBFABRIC
  std::vector<std::string> providers{"efa", "verbs;ofi_rxm"};  // MOONCAKE_FABRIC_PROVIDERS
  std::string requiredProvider;                                // MOONCAKE_FABRIC_REQUIRE
  std::string requiredBy = "MOONCAKE_FABRIC_REQUIRE";  // no variable: the source of that demand
  std::vector<std::string> devices;                    // MC_TE_FILTERS: empty: all
  std::vector<std::string> excludedDevices;            // MC_TE_FILTERS_EXCLUDE
  std::chrono::milliseconds timeout{500};              // MOONCAKE_NIC_TIMEOUT_MS
  size_t mostUnderWay = 0;                             // MC_MAX_WR: 0: the provider's depth
  uint64_t mostMemoryBytes = uint64_t(1) << 40;        // MC_MAX_MR_SIZE: largest registration
  NicSelection selection = NicSelection::kAll;         // MC_EFA_NIC_SELECTION
  size_t pollThreads = 1;                              // MC_EFA_CQ_THREADS: 0: one per card
  uint64_t stripingThreshold = 2 << 20;                // MC_EFA_STRIPING_THRESHOLD
  std::string topologyPath;                            // MC_CUSTOM_TOPO_JSON

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<FabricEnv> read();
  // Also applies the settings in `told`. kUnsupported: the variables contradict them.
  static Result<FabricEnv> read(const EngineEnv& told);
  static std::vector<EnvVariable> variables();
};

}  // namespace mooncake
