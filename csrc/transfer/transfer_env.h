#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"

namespace mooncake {

// Settings of a transfer engine, read when one is made.
struct TransferEnv {
  std::chrono::seconds timeout{30};           // MC_TRANSFER_TIMEOUT: plus 1 ns for each byte
  std::chrono::seconds sessionTimeout{5};     // MC_HANDSHAKE_CONNECT_TIMEOUT
  uint16_t leastRpcPort = 15000;              // MC_MIN_RPC_PORT
  uint16_t mostRpcPort = 17000;               // MC_MAX_RPC_PORT
  std::optional<std::string> tcpBindAddress;  // MC_TCP_BIND_ADDRESS
  bool usesGivenRpcPort = false;  // MC_LEGACY_RPC_PORT_BINDING: the port of the local name
  size_t mostTransfers = 64;      // MC_TCP_MAX_CONNECTIONS: under way at a time
  size_t tcpIoThreads = 0;        // MC_NUM_TCP_IO_THREADS; read() turns 0 into min(8, cores)
  std::string metadataCluster;    // MC_METADATA_CLUSTER_ID: prefix of keys in a metadata server
  bool forcesTcp = false;         // MC_FORCE_TCP: also within a host and a process
  bool allowsFallback = false;    // MOONCAKE_ALLOW_FALLBACK: tcp if the protocol is missing

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<TransferEnv> read();
  static std::vector<EnvVariable> variables();
};

}  // namespace mooncake
