#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"

namespace mooncake {

// The variables of a transfer engine alone, read when one is made. In the table of base/env.h, and
// set but empty is as good as not set there, too.
struct TransferEnv {
  std::chrono::seconds timeout{30};           // MC_TRANSFER_TIMEOUT: and 1 ns for each byte
  std::chrono::seconds sessionTimeout{5};     // MC_HANDSHAKE_CONNECT_TIMEOUT
  uint16_t leastRpcPort = 15000;              // MC_MIN_RPC_PORT
  uint16_t mostRpcPort = 17000;               // MC_MAX_RPC_PORT
  std::optional<std::string> tcpBindAddress;  // MC_TCP_BIND_ADDRESS
  bool usesGivenRpcPort = false;  // MC_LEGACY_RPC_PORT_BINDING: the port of the local name
  size_t mostTransfers = 64;      // MC_TCP_MAX_CONNECTIONS: under way at a time
  size_t tcpIoThreads = 0;        // MC_NUM_TCP_IO_THREADS; of 0 read() makes min(8, cores)
  std::string metadataCluster;    // MC_METADATA_CLUSTER_ID: in front of keys in a metadata server
  bool forcesTcp = false;         // MC_FORCE_TCP: no short way within a host
  bool allowsFallback = false;    // MOONCAKE_ALLOW_FALLBACK: tcp for a protocol that is not there

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<TransferEnv> read();
};

}  // namespace mooncake
