#include "engine/env.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <string_view>

#include "base/log_env.h"

namespace mooncake {
namespace {

bool isTransportName(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

// The engine's own tables are in the arena, too.
bool parseArenaBytes(std::string_view value, EngineEnv& env, std::string& allowed) {
  uint64_t bytes = 0;
  const bool isNumber = parseNumber(value, 0, uint64_t(1) << 46, bytes, allowed);
  allowed = "0, or a whole number from 67108864 (64 MiB) to 70368744177664 (64 TiB)";
  env.arenaBytes = bytes;
  return isNumber && (bytes == 0 || bytes >= uint64_t(64) << 20);
}

// The engine's registry checks that the names exist.
bool parseTransports(std::string_view value, EngineEnv& env, std::string& allowed) {
  const bool areNames = parseNames(value, env.transports, allowed);
  allowed = "names of transports, each once, separated by commas: shm,tcp";
  for (auto name = env.transports.begin(); name != env.transports.end(); ++name) {
    if (!isTransportName(*name) || std::find(env.transports.begin(), name, *name) != name)
      return false;
  }
  return areNames;
}

bool parseHostIp(std::string_view value, EngineEnv& env, std::string& allowed) {
  allowed = "an IPv4 or IPv6 address of this host, in digits";
  std::array<unsigned char, sizeof(in6_addr)> parsed;
  env.hostIp = value;
  return ::inet_pton(AF_INET, env.hostIp->c_str(), parsed.data()) == 1 ||
         ::inet_pton(AF_INET6, env.hostIp->c_str(), parsed.data()) == 1;
}

bool parseJobKey(std::string_view value, EngineEnv& env, std::string& allowed) {
  allowed = std::to_string(kLeastJobKeyBytes) + " bytes or more, better 32 random ones";
  env.jobKey = value;
  return value.size() >= kLeastJobKeyBytes;
}

constexpr EnvEntry<EngineEnv> kTable[] = {
    {{"MOONCAKE_TRANSPORTS", "",
      "Transports to use, in order of preference, separated by commas; empty means all"},
     parseTransports},
    {{"MOONCAKE_HOST_IP", "",
      "Address to listen on and to publish to peers; empty means the code chooses"},
     parseHostIp},
    {{"MOONCAKE_JOB_KEY", "",
      "Shared secret of the job, 16 bytes or more; a process without it cannot connect"},
     parseJobKey,
     /*isSecret=*/true},
    {{"MOONCAKE_FAILURE_TIMEOUT_MS", "3000",
      "Silence after which a rank is given up, from 10 ms to a day"},
     numberInto<&EngineEnv::failureTimeout, 10, 86'400'000>},
    {{"MOONCAKE_TCP_CONNECTIONS", "2", "TCP data connections per peer, 1 to 64"},
     numberInto<&EngineEnv::tcpConnections, 1, 64>},
    {{"MOONCAKE_CMA", "1", "0 turns reading a peer's memory with process_vm_readv off"},
     flagInto<&EngineEnv::crossMemoryAttach>},
    {{"MOONCAKE_CUDA_IPC", "0",
      "1: transfers between devices of processes of one host are copies by the device"},
     flagInto<&EngineEnv::mapsDeviceMemory>},
    {{"MOONCAKE_PEER_MESSAGES", "0",
      "Bytes of each device for messages to processes of this host, which map them, and as many "
      "for "
      "messages from these; 0: such messages take host memory"},
     numberInto<&EngineEnv::peerMessages, 0, uint64_t(1) << 40>},
    {{"MOONCAKE_PROXY_THREADS", "0",
      "Threads that post the commands of a group's kernels to other hosts, at most 64; 0: one for "
      "each network card, at most 8. Never more than there are ranks on other hosts"},
     numberInto<&EngineEnv::proxyThreads, 0, 64>},
    {{"MOONCAKE_ARENA_BYTES", "0",
      "Address space for all Buffers, groups and windows that share an engine, of which only "
      "touched pages take memory; 0: 64 GiB"},
     parseArenaBytes},
    {{"MOONCAKE_SIM_SEED", "1", "Seed of the faults and delays of transport sim"},
     numberInto<&EngineEnv::simSeed, 0, UINT64_MAX>},
};

}  // namespace

Result<EngineEnv> EngineEnv::read() {
  if (const auto log = LogEnv::read(); !log.ok()) return log.error();
  return readEnv(kTable);
}

std::vector<EnvVariable> EngineEnv::variables() { return variablesOf(kTable); }

}  // namespace mooncake
