#pragma once

#include <string>

#include "base/env.h"

namespace mooncake {

// Settings of a backend, for a group whose options do not say otherwise.
struct BackendEnv {
  bool raises = false;                     // MOONCAKE_ON_FAILURE=raise: a loss ends one operation
  bool streamWords = true;                 // MOONCAKE_STREAM_WORDS: see StreamStaging
  bool epStreamWords = true;               // MOONCAKE_EP_STREAM_WORDS: the same for Buffers
  bool epKernels = false;                  // MOONCAKE_EP_KERNELS
  size_t pinnedCache = size_t{512} << 20;  // MOONCAKE_PINNED_CACHE
  size_t peerBytes = 0;                    // MOONCAKE_PEER_BYTES
  std::string peerTable;                   // MOONCAKE_PEER_TABLE: a file; see PeerTable
  size_t graphMemory = size_t{1} << 30;    // MOONCAKE_GRAPH_MEMORY: GraphMemory's limit
  bool blockingWait = false;               // MOONCAKE_BLOCKING_WAIT

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<BackendEnv> read();
};

}  // namespace mooncake
