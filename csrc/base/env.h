#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace mooncake {

// Every environment variable that the native code reads: name, meaning, default. Variables are read
// when an engine is made (no global state), so two engines made under different environments
// differ. An empty variable counts as not set. docs/environment.md is generated from envTable().
struct EnvVariable {
  const char* name;
  const char* defaultValue;
  const char* meaning;
};
const std::vector<EnvVariable>& envTable();

// Shortest job key: a process that guesses the key can write to our memory.
inline constexpr size_t kLeastJobKeyBytes = 16;

// Held while we read the process's environment, and while a library that may change it starts: a
// string that setenv() frees may still be read by another thread. Recursive, because the log reads
// its own level. In a forked child it is free, even if another thread held it at the fork.
std::recursive_mutex& environmentMutex();

struct Env {
  std::vector<std::string> transports;  // MOONCAKE_TRANSPORTS: by preference, empty = all
  std::optional<std::string> hostIp;    // MOONCAKE_HOST_IP: address to listen on and to publish
  std::string routeHint;  // no variable: the rendezvous host, from the creator of the engine
  std::optional<std::string> jobKey;               // MOONCAKE_JOB_KEY: shared secret of the job
  std::chrono::milliseconds failureTimeout{3000};  // MOONCAKE_FAILURE_TIMEOUT_MS
  size_t tcpConnections = 2;      // MOONCAKE_TCP_CONNECTIONS: data connections per peer
  size_t eagerBytes = 0;          // MOONCAKE_EAGER_BYTES: 0 = chosen by the code
  bool crossMemoryAttach = true;  // MOONCAKE_CMA=0 turns process_vm_readv off
  bool raises = false;            // MOONCAKE_ON_FAILURE=raise: a loss ends one operation
  uint64_t simSeed = 1;           // MOONCAKE_SIM_SEED: seed of transport sim
  std::string waitsFile;          // beside TORCHELASTIC_ERROR_FILE: see noteWaits() in membership/
  // No variables; FabricEnv::read() merges them: the required provider, the source of that demand
  // (for errors), and the names of the cards to use, if not all.
  std::string fabricProvider, fabricProviderWish;
  std::vector<std::string> fabricDevices;
  std::string logLevel = "warning";  // MOONCAKE_LOG_LEVEL: error, warning, info, debug

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<Env> read();
};

}  // namespace mooncake
