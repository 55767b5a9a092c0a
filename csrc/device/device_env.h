#pragma once

#include <cstddef>
#include <vector>

#include "base/env.h"
#include "device/device_types.h"

namespace mooncake {

// Settings of devices.
struct DeviceEnv {
  size_t peerMemory = size_t{16} << 30;  // MOONCAKE_PEER_MEMORY: PeerMappings' limit
  StreamPriority streamPriority = StreamPriority::kNormal;  // MOONCAKE_STREAM_PRIORITY

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<DeviceEnv> read();
  static std::vector<EnvVariable> variables();
};

}  // namespace mooncake
