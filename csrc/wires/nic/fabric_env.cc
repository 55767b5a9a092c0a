#include "wires/nic/fabric_env.h"

#include <string_view>

#include "engine/env.h"

namespace mooncake {
namespace {

bool parseLibfabric(std::string_view value, FabricEnv& env, std::string& allowed) {
  allowed = "an absolute path";
  env.libfabricPath = value;
  return value.starts_with('/');
}

bool parseRequiredProvider(std::string_view value, FabricEnv& env, std::string& allowed) {
  allowed = "the name of one provider";
  env.requiredProvider = value;
  return value.find(',') == std::string_view::npos;
}

bool parseNicSelection(std::string_view value, FabricEnv& env, std::string& allowed) {
  allowed = "all or local";
  env.selection = value == "local" ? NicSelection::kLocal : NicSelection::kAll;
  return value == "all" || value == "local";
}

constexpr EnvEntry<FabricEnv> kTable[] = {
    {{"MOONCAKE_LIBFABRIC", "",
      "Path of the libfabric.so to open; empty: the one in the process, else that of the EFA "
      "installer, else the system's"},
     parseLibfabric},
    {{"MOONCAKE_FABRIC_PROVIDERS", "efa,verbs;ofi_rxm",
      "Providers of libfabric that may be used, in order of preference, separated by commas"},
     namesInto<&FabricEnv::providers>},
    {{"MOONCAKE_FABRIC_REQUIRE", "",
      "The one provider that must be available; without it nothing starts"},
     parseRequiredProvider},
    {{"MC_TE_FILTERS", "", "Network cards to use, by name, separated by commas; empty: all"},
     namesInto<&FabricEnv::devices>},
    {{"MC_TE_FILTERS_EXCLUDE", "", "Network cards not to use"},
     namesInto<&FabricEnv::excludedDevices>},
    {{"MOONCAKE_NIC_TIMEOUT_MS", "500",
      "Time without any progress towards a peer after which a card's operation is given up"},
     numberInto<&FabricEnv::timeout, 10, 3'600'000>},
    {{"MC_MAX_WR", "0", "Operations in flight on one card, 0: as many as its provider takes"},
     numberInto<&FabricEnv::mostUnderWay, 0, 65536>},
    {{"MC_MAX_MR_SIZE", "1099511627776", "Bytes of one registration; longer memory is split"},
     numberInto<&FabricEnv::mostMemoryBytes, 1 << 20, UINT64_MAX>},
    {{"MC_EFA_NIC_SELECTION", "all", "Cards for memory: all, or local ones of its NUMA node"},
     parseNicSelection},
    {{"MC_EFA_CQ_THREADS", "1", "Threads that poll the cards of an engine, 0: one for each card"},
     numberInto<&FabricEnv::pollThreads, 0, 64>},
    {{"MC_EFA_STRIPING_THRESHOLD", "2097152",
      "Least bytes of a transfer that is split over all cards; a sixteenth of it while fewer "
      "transfers than cards are in flight"},
     numberInto<&FabricEnv::stripingThreshold, 0, UINT64_MAX>},
    {{"MC_CUSTOM_TOPO_JSON", "",
      "Path of a file that replaces sysfs: it says which cards are near which memory"},
     textInto<&FabricEnv::topologyPath>},
};

}  // namespace

Result<FabricEnv> FabricEnv::read() { return readEnv(kTable); }

Result<FabricEnv> FabricEnv::read(const EngineEnv& told) {
  auto env = read();
  if (!env.ok()) return env;
  if (!told.fabricDevices.empty()) env->devices = told.fabricDevices;
  if (told.fabricProvider.empty()) return env;
  if (!env->requiredProvider.empty() && env->requiredProvider != told.fabricProvider) {
    return Error{ErrorCode::kUnsupported,
                 told.fabricProviderWish + " is provider " + told.fabricProvider +
                     ", and MOONCAKE_FABRIC_REQUIRE asks for " + env->requiredProvider};
  }
  env->requiredProvider = told.fabricProvider;
  env->requiredBy = told.fabricProviderWish;
  return env;
}

std::vector<EnvVariable> FabricEnv::variables() { return variablesOf(kTable); }

}  // namespace mooncake
