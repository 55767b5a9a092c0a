#include "transfer/transfer_env.h"

#include <algorithm>
#include <string_view>
#include <thread>

namespace mooncake {
namespace {

bool parseTransferTimeout(std::string_view value, TransferEnv& env, std::string& allowed) {
  constexpr uint64_t kLeast = 5;
  uint64_t number = 0;
  const bool ok = parseNumber(value, 0, 1'000'000, number, allowed);
  env.timeout = std::chrono::seconds(std::max(kLeast, number));
  return ok;
}

bool parseMetadataCluster(std::string_view value, TransferEnv& env, std::string& allowed) {
  allowed = "up to 128 bytes";
  env.metadataCluster = value;
  return value.size() <= 128;
}

constexpr EnvEntry<TransferEnv> kTable[] = {
    {{"MC_TRANSFER_TIMEOUT", "30",
      "Seconds that a transfer may take, 5 at least; a nanosecond for each byte is added"},
     parseTransferTimeout},
    {{"MC_HANDSHAKE_CONNECT_TIMEOUT", "5",
      "Seconds within which a peer must identify itself to a transfer engine"},
     numberInto<&TransferEnv::sessionTimeout, 1, 3600>},
    {{"MC_MIN_RPC_PORT", "15000", "The least port of a transfer engine's session"},
     numberInto<&TransferEnv::leastRpcPort, 1, UINT16_MAX>},
    {{"MC_MAX_RPC_PORT", "17000", "The largest port of a transfer engine's session"},
     numberInto<&TransferEnv::mostRpcPort, 1, UINT16_MAX>},
    {{"MC_MIN_PRC_PORT", "15000", "MC_MIN_RPC_PORT, as some callers spell it"},
     numberInto<&TransferEnv::leastRpcPort, 1, UINT16_MAX>},
    {{"MC_MAX_PRC_PORT", "17000", "MC_MAX_RPC_PORT, as some callers spell it"},
     numberInto<&TransferEnv::mostRpcPort, 1, UINT16_MAX>},
    {{"MC_TCP_BIND_ADDRESS", "",
      "Address that a transfer engine listens on; MOONCAKE_HOST_IP wins"},
     textInto<&TransferEnv::tcpBindAddress>},
    {{"MC_LEGACY_RPC_PORT_BINDING", "0",
      "1: a transfer engine with a metadata server listens at the port of its own name"},
     flagInto<&TransferEnv::usesGivenRpcPort>},
    {{"MC_TCP_MAX_CONNECTIONS", "64",
      "Slots for transfers in flight, 1 to 4096. At most half of them serve one peer, and a "
      "transfer that has not ended after 10 ms gives its slot back"},
     numberInto<&TransferEnv::mostTransfers, 1, 4096>},
    {{"MC_NUM_TCP_IO_THREADS", "0",
      "Threads of a transfer engine that carry bulk data over TCP, up to 64; 0: one per core, 8 at "
      "most"},
     numberInto<&TransferEnv::tcpIoThreads, 0, 64>},
    {{"MC_METADATA_CLUSTER_ID", "", "Prefix of all keys in a metadata server"},
     parseMetadataCluster},
    {{"MC_FORCE_TCP", "0",
      "1: transfer engines use tcp within a host and a process, too, and for any protocol"},
     flagInto<&TransferEnv::forcesTcp>},
    {{"MOONCAKE_ALLOW_FALLBACK", "0",
      "1: a transfer engine runs on tcp when the requested protocol is missing"},
     flagInto<&TransferEnv::allowsFallback>},
};

}  // namespace

Result<TransferEnv> TransferEnv::read() {
  constexpr size_t kMostIoThreads = 8;
  auto env = readEnv(kTable);
  if (env.ok() && env->tcpIoThreads == 0)
    env->tcpIoThreads = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, kMostIoThreads);
  return env;
}

std::vector<EnvVariable> TransferEnv::variables() { return variablesOf(kTable); }

}  // namespace mooncake
