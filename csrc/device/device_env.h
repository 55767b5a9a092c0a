#pragma once

#include <cstddef>
#include <vector>

#include "base/env.h"

namespace mooncake {

// Settings of devices.
struct DeviceEnv {
  size_t peerMemory = size_t{16} << 30;  // MOONCAKE_PEER_MEMORY: PeerMappings' limit

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<DeviceEnv> read();
  static std::vector<EnvVariable> variables();
};

}  // namespace mooncake
