#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"

namespace mooncake {

// Shortest job key: a process that guesses the key can write to our memory.
inline constexpr size_t kLeastJobKeyBytes = 16;

// Settings of an engine and its wires. Network cards have more, in FabricEnv.
struct EngineEnv {
  std::vector<std::string> transports;  // MOONCAKE_TRANSPORTS: by preference, empty = all
  std::optional<std::string> hostIp;    // MOONCAKE_HOST_IP: address to listen on and to publish
  std::string routeHint;  // no variable: the rendezvous host, from the creator of the engine
  std::optional<std::string> jobKey;               // MOONCAKE_JOB_KEY: shared secret of the job
  std::chrono::milliseconds failureTimeout{3000};  // MOONCAKE_FAILURE_TIMEOUT_MS
  size_t tcpConnections = 2;      // MOONCAKE_TCP_CONNECTIONS: data connections per peer
  bool crossMemoryAttach = true;  // MOONCAKE_CMA=0 turns process_vm_readv off
  bool mapsDeviceMemory = false;  // MOONCAKE_CUDA_IPC
  size_t peerMessages = 0;        // MOONCAKE_PEER_MESSAGES: bytes, see MessagePools
  size_t proxyThreads = 0;        // MOONCAKE_PROXY_THREADS: 0: see proxy::threadsFor()
  size_t arenaBytes = 0;          // MOONCAKE_ARENA_BYTES: 0: see EngineOptions::arenaBytes
  uint64_t simSeed = 1;           // MOONCAKE_SIM_SEED: seed of transport sim
  // No variables; FabricEnv::read() merges them: the required provider, the source of that demand
  // (for errors), and the names of the cards to use, if not all.
  std::string fabricProvider, fabricProviderWish;
  std::vector<std::string> fabricDevices;

  // kInvalidArgument names the variable, its value and what is allowed. Also checks the variables
  // of the log, which cannot refuse them itself.
  static Result<EngineEnv> read();
  static std::vector<EnvVariable> variables();
};

}  // namespace mooncake
