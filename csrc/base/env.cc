#include "base/env.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <pthread.h>
#include <string_view>
#include <thread>

#include "base/fabric_env.h"
#include "base/log.h"
#include "base/transfer_env.h"

namespace mooncake {
namespace {

// `parse` stores the value in the struct and returns true. If it returns false, `allowed` says
// which values are valid.
template <typename To>
struct EntryOf {
  EnvVariable variable;
  bool (*parse)(std::string_view value, To& env, std::string& allowed);
  bool isSecret = false;  // no message may show the value
};
using Entry = EntryOf<Env>;
using TransferEntry = EntryOf<TransferEnv>;
using FabricEntry = EntryOf<FabricEnv>;

bool parseNumber(std::string_view value, uint64_t least, uint64_t most, uint64_t& number,
                 std::string& allowed) {
  allowed = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  return error == std::errc() && stop == end && number >= least && number <= most;
}

bool isTransportName(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

// The engine's registry checks that the names exist.
bool parseTransports(std::string_view value, Env& env, std::string& allowed) {
  allowed = "names of transports, each once, separated by commas: shm,tcp";
  env.transports.clear();
  for (;;) {
    const size_t comma = value.find(',');
    const std::string_view name = value.substr(0, comma);
    const bool isNew =
        std::find(env.transports.begin(), env.transports.end(), name) == env.transports.end();
    if (!isTransportName(name) || !isNew) return false;
    env.transports.emplace_back(name);
    if (comma == std::string_view::npos) return true;
    value.remove_prefix(comma + 1);
  }
}

bool parseHostIp(std::string_view value, Env& env, std::string& allowed) {
  allowed = "an IPv4 or IPv6 address of this host, in digits";
  std::array<unsigned char, sizeof(in6_addr)> parsed;
  env.hostIp = value;
  return ::inet_pton(AF_INET, env.hostIp->c_str(), parsed.data()) == 1 ||
         ::inet_pton(AF_INET6, env.hostIp->c_str(), parsed.data()) == 1;
}

bool parseJobKey(std::string_view value, Env& env, std::string& allowed) {
  allowed = std::to_string(kLeastJobKeyBytes) + " bytes or more, better 32 random ones";
  env.jobKey = value;
  return value.size() >= kLeastJobKeyBytes;
}

bool parseFailureTimeout(std::string_view value, Env& env, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, 10, 86'400'000, number, allowed);
  env.failureTimeout = std::chrono::milliseconds(number);
  return ok;
}

bool parseTcpConnections(std::string_view value, Env& env, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, 1, 64, number, allowed);
  env.tcpConnections = number;
  return ok;
}

bool parseEagerBytes(std::string_view value, Env& env, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, 0, uint64_t(1) << 30, number, allowed);
  env.eagerBytes = number;
  return ok;
}

bool parseCrossMemoryAttach(std::string_view value, Env& env, std::string& allowed) {
  allowed = "0 or 1";
  env.crossMemoryAttach = value == "1";
  return value == "0" || value == "1";
}

bool parseOnFailure(std::string_view value, Env& env, std::string& allowed) {
  allowed = "continue or raise";
  env.raises = value == "raise";
  return value == "continue" || value == "raise";
}

bool parseSimSeed(std::string_view value, Env& env, std::string& allowed) {
  return parseNumber(value, 0, UINT64_MAX, env.simSeed, allowed);
}

bool parseErrorFile(std::string_view value, Env& env, std::string& allowed) {
  allowed = "a path";
  const size_t slash = value.rfind('/');
  if (slash != std::string_view::npos)
    env.waitsFile = std::string(value.substr(0, slash + 1)) + "waits.txt";
  return true;
}

bool parseFlag(std::string_view value, bool& flag, std::string& allowed) {
  allowed = "0 or 1";
  flag = value == "1";
  return value == "0" || value == "1";
}

bool parsePort(std::string_view value, uint16_t& port, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, 1, UINT16_MAX, number, allowed);
  port = static_cast<uint16_t>(number);
  return ok;
}

bool parseLeastRpcPort(std::string_view value, TransferEnv& env, std::string& allowed) {
  return parsePort(value, env.leastRpcPort, allowed);
}

bool parseMostRpcPort(std::string_view value, TransferEnv& env, std::string& allowed) {
  return parsePort(value, env.mostRpcPort, allowed);
}

bool parseTransferTimeout(std::string_view value, TransferEnv& env, std::string& allowed) {
  constexpr uint64_t kLeast = 5;
  uint64_t number = 0;
  const bool ok = parseNumber(value, 0, 1'000'000, number, allowed);
  env.timeout = std::chrono::seconds(std::max(kLeast, number));
  return ok;
}

bool parseSessionTimeout(std::string_view value, TransferEnv& env, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, 1, 3600, number, allowed);
  env.sessionTimeout = std::chrono::seconds(number);
  return ok;
}

bool parseTcpBindAddress(std::string_view value, TransferEnv& env, std::string& allowed) {
  allowed = "an address of this host, or a name of it";
  env.tcpBindAddress = value;
  return true;
}

bool parseGivenRpcPort(std::string_view value, TransferEnv& env, std::string& allowed) {
  return parseFlag(value, env.usesGivenRpcPort, allowed);
}

bool parseMostTransfers(std::string_view value, TransferEnv& env, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, 1, 4096, number, allowed);
  env.mostTransfers = number;
  return ok;
}

bool parseTcpIoThreads(std::string_view value, TransferEnv& env, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, 0, 64, number, allowed);
  env.tcpIoThreads = number;
  return ok;
}

bool parseMetadataCluster(std::string_view value, TransferEnv& env, std::string& allowed) {
  allowed = "up to 128 bytes";
  env.metadataCluster = value;
  return value.size() <= 128;
}

bool parseForceTcp(std::string_view value, TransferEnv& env, std::string& allowed) {
  return parseFlag(value, env.forcesTcp, allowed);
}

bool parseAllowFallback(std::string_view value, TransferEnv& env, std::string& allowed) {
  return parseFlag(value, env.allowsFallback, allowed);
}

bool parseLogLevel(std::string_view value, Env& env, std::string& allowed) {
  allowed = "error, warning, info or debug";
  env.logLevel = value;
  return logLevelFromName(value).has_value();
}

// Non-empty names, separated by commas.
bool parseNames(std::string_view value, std::vector<std::string>& names, std::string& allowed) {
  allowed = "names, separated by commas";
  names.clear();
  for (;;) {
    const size_t comma = value.find(',');
    if (comma == 0 || value.empty()) return false;
    names.emplace_back(value.substr(0, comma));
    if (comma == std::string_view::npos) return true;
    value.remove_prefix(comma + 1);
  }
}

bool parseLibfabric(std::string_view value, FabricEnv& env, std::string& allowed) {
  allowed = "an absolute path";
  env.libfabricPath = value;
  return value.starts_with('/');
}

bool parseProviders(std::string_view value, FabricEnv& env, std::string& allowed) {
  return parseNames(value, env.providers, allowed);
}

bool parseRequiredProvider(std::string_view value, FabricEnv& env, std::string& allowed) {
  allowed = "the name of one provider";
  env.requiredProvider = value;
  return value.find(',') == std::string_view::npos;
}

bool parseDevices(std::string_view value, FabricEnv& env, std::string& allowed) {
  return parseNames(value, env.devices, allowed);
}

bool parseExcludedDevices(std::string_view value, FabricEnv& env, std::string& allowed) {
  return parseNames(value, env.excludedDevices, allowed);
}

bool parseNicTimeout(std::string_view value, FabricEnv& env, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, 10, 3'600'000, number, allowed);
  env.timeout = std::chrono::milliseconds(number);
  return ok;
}

bool parseMostUnderWay(std::string_view value, FabricEnv& env, std::string& allowed) {
  return parseNumber(value, 0, 65536, env.mostUnderWay, allowed);
}

bool parseMostMemory(std::string_view value, FabricEnv& env, std::string& allowed) {
  return parseNumber(value, 1 << 20, UINT64_MAX, env.mostMemoryBytes, allowed);
}

bool parseNicSelection(std::string_view value, FabricEnv& env, std::string& allowed) {
  allowed = "all or local";
  env.selection = value == "local" ? NicSelection::kLocal : NicSelection::kAll;
  return value == "all" || value == "local";
}

bool parsePollThreads(std::string_view value, FabricEnv& env, std::string& allowed) {
  return parseNumber(value, 0, 64, env.pollThreads, allowed);
}

bool parseStripingThreshold(std::string_view value, FabricEnv& env, std::string& allowed) {
  return parseNumber(value, 0, UINT64_MAX, env.stripingThreshold, allowed);
}

bool parseTopologyPath(std::string_view value, FabricEnv& env, std::string& allowed) {
  allowed = "the path of a file";
  env.topologyPath = value;
  return true;
}

constexpr Entry kEntries[] = {
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
     parseFailureTimeout},
    {{"MOONCAKE_ON_FAILURE", "continue",
      "What a loss does to the operation that it interrupts: continue or raise"},
     parseOnFailure},
    {{"MOONCAKE_TCP_CONNECTIONS", "2", "TCP data connections per peer, 1 to 64"},
     parseTcpConnections},
    {{"MOONCAKE_EAGER_BYTES", "0", "Eager limit in bytes; 0 = automatic"}, parseEagerBytes},
    {{"MOONCAKE_CMA", "1", "0 turns reading a peer's memory with process_vm_readv off"},
     parseCrossMemoryAttach},
    {{"MOONCAKE_SIM_SEED", "1", "Seed of the faults and delays of transport sim"}, parseSimSeed},
    {{"TORCHELASTIC_ERROR_FILE", "",
      "Set by launchers; in its folder mooncake-run's ranks note how long losses held them up"},
     parseErrorFile},
    {{"MOONCAKE_LOG_LEVEL", "warning", "What is logged to stderr: error, warning, info or debug"},
     parseLogLevel},
};

constexpr TransferEntry kTransferEntries[] = {
    {{"MC_TRANSFER_TIMEOUT", "30",
      "Seconds that a transfer may take, 5 at least; a nanosecond for each byte is added"},
     parseTransferTimeout},
    {{"MC_HANDSHAKE_CONNECT_TIMEOUT", "5",
      "Seconds within which a peer must identify itself to a transfer engine"},
     parseSessionTimeout},
    {{"MC_MIN_RPC_PORT", "15000", "The least port of a transfer engine's session"},
     parseLeastRpcPort},
    {{"MC_MAX_RPC_PORT", "17000", "The largest port of a transfer engine's session"},
     parseMostRpcPort},
    {{"MC_MIN_PRC_PORT", "15000", "MC_MIN_RPC_PORT, as some callers spell it"}, parseLeastRpcPort},
    {{"MC_MAX_PRC_PORT", "17000", "MC_MAX_RPC_PORT, as some callers spell it"}, parseMostRpcPort},
    {{"MC_TCP_BIND_ADDRESS", "",
      "Address that a transfer engine listens on; MOONCAKE_HOST_IP wins"},
     parseTcpBindAddress},
    {{"MC_LEGACY_RPC_PORT_BINDING", "0",
      "1: a transfer engine with a metadata server listens at the port of its own name"},
     parseGivenRpcPort},
    {{"MC_TCP_MAX_CONNECTIONS", "64",
      "Slots for transfers in flight, 1 to 4096. At most half of them serve one peer, and a "
      "transfer that has not ended after 10 ms gives its slot back"},
     parseMostTransfers},
    {{"MC_NUM_TCP_IO_THREADS", "0",
      "Threads of a transfer engine that carry bulk data over TCP, up to 64; 0: one per core, 8 at "
      "most"},
     parseTcpIoThreads},
    {{"MC_METADATA_CLUSTER_ID", "", "Prefix of all keys in a metadata server"},
     parseMetadataCluster},
    {{"MC_FORCE_TCP", "0",
      "1: transfer engines use tcp within a host and a process, too, and for any protocol"},
     parseForceTcp},
    {{"MOONCAKE_ALLOW_FALLBACK", "0",
      "1: a transfer engine runs on tcp when the requested protocol is missing"},
     parseAllowFallback},
};

constexpr FabricEntry kFabricEntries[] = {
    {{"MOONCAKE_LIBFABRIC", "",
      "Path of the libfabric.so to open; empty: the one in the process, else that of the EFA "
      "installer, else the system's"},
     parseLibfabric},
    {{"MOONCAKE_FABRIC_PROVIDERS", "efa,verbs;ofi_rxm",
      "Providers of libfabric that may be used, in order of preference, separated by commas"},
     parseProviders},
    {{"MOONCAKE_FABRIC_REQUIRE", "",
      "The one provider that must be available; without it nothing starts"},
     parseRequiredProvider},
    {{"MC_TE_FILTERS", "", "Network cards to use, by name, separated by commas; empty: all"},
     parseDevices},
    {{"MC_TE_FILTERS_EXCLUDE", "", "Network cards not to use"}, parseExcludedDevices},
    {{"MOONCAKE_NIC_TIMEOUT_MS", "500",
      "Time without any progress towards a peer after which a card's operation is given up"},
     parseNicTimeout},
    {{"MC_MAX_WR", "0", "Operations in flight on one card, 0: as many as its provider takes"},
     parseMostUnderWay},
    {{"MC_MAX_MR_SIZE", "1099511627776", "Bytes of one registration; longer memory is split"},
     parseMostMemory},
    {{"MC_EFA_NIC_SELECTION", "all", "Cards for memory: all, or local ones of its NUMA node"},
     parseNicSelection},
    {{"MC_EFA_CQ_THREADS", "1", "Threads that poll the cards of an engine, 0: one for each card"},
     parsePollThreads},
    {{"MC_EFA_STRIPING_THRESHOLD", "2097152",
      "Least bytes of a transfer that is split over all cards; a sixteenth of it while fewer "
      "transfers than cards are in flight"},
     parseStripingThreshold},
    {{"MC_CUSTOM_TOPO_JSON", "",
      "Path of a file that replaces sysfs: it says which cards are near which memory"},
     parseTopologyPath},
};

template <typename To, size_t N>
Result<To> readAll(const EntryOf<To> (&entries)[N]) {
  std::lock_guard lock(environmentMutex());
  To env;
  for (const auto& [variable, parse, isSecret] : entries) {
    const char* value = std::getenv(variable.name);
    if (value == nullptr || *value == '\0')
      continue;  // launchers often pass a variable that they lack as ""
    std::string allowed;
    if (!parse(value, env, allowed)) {
      return Error{ErrorCode::kInvalidArgument,
                   std::string(variable.name) +
                       (isSecret ? " has " + std::to_string(std::string_view(value).size()) +
                                       " bytes, which "
                                 : "=\"" + std::string(value) + "\" ") +
                       "is not valid; allowed: " + allowed};
    }
  }
  return env;
}

}  // namespace

std::recursive_mutex& environmentMutex() {
  alignas(std::recursive_mutex) static std::byte memory[sizeof(std::recursive_mutex)];
  static auto* const made = [] {
    ::pthread_atfork(nullptr, nullptr, [] { new (memory) std::recursive_mutex; });
    return new (memory) std::recursive_mutex;
  }();
  return *made;
}

const std::vector<EnvVariable>& envTable() {
  static const auto table = [] {
    std::vector<EnvVariable> variables;
    for (const Entry& entry : kEntries) variables.push_back(entry.variable);
    for (const TransferEntry& entry : kTransferEntries) variables.push_back(entry.variable);
    for (const FabricEntry& entry : kFabricEntries) variables.push_back(entry.variable);
    return variables;
  }();
  return table;
}

Result<Env> Env::read() { return readAll(kEntries); }

Result<TransferEnv> TransferEnv::read() {
  constexpr size_t kMostIoThreads = 8;
  auto env = readAll(kTransferEntries);
  if (env.ok() && env->tcpIoThreads == 0)
    env->tcpIoThreads = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, kMostIoThreads);
  return env;
}

Result<FabricEnv> FabricEnv::read() { return readAll(kFabricEntries); }

Result<FabricEnv> FabricEnv::read(const Env& told) {
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

}  // namespace mooncake
