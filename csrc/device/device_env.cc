#include "device/device_env.h"

namespace mooncake {
namespace {

constexpr EnvEntry<DeviceEnv> kTable[] = {
    {{"MOONCAKE_PEER_MEMORY", "17179869184",
      "Bytes that a process allocates on a device to share with processes of its host, and that it "
      "maps of each of them"},
     numberInto<&DeviceEnv::peerMemory, 0, uint64_t(1) << 48>},
};

}  // namespace

Result<DeviceEnv> DeviceEnv::read() { return readEnv(kTable); }

std::vector<EnvVariable> DeviceEnv::variables() { return variablesOf(kTable); }

}  // namespace mooncake
