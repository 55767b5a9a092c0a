#pragma once

#include <cstddef>

#include "peers/peer_table.h"

namespace mooncake {

// Of GroupStreams.
struct StreamSettings {
  bool words = true;       // collectives use them, where the device's streams know words
  bool rows = false;       // a kernel copies the used rows of tensors, see UsedRows
  size_t pinnedCache = 0;  // bytes; the first group that uses the device decides
  size_t graphMemory = 0;  // bytes of pinned memory for operations in graphs
  size_t peerBytes = 0;    // largest input of a call that goes by kernels; 0: none does
  PeerTable peerTable;
};

}  // namespace mooncake
