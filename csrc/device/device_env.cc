#include "device/device_env.h"

namespace mooncake {
namespace {

bool parsePriority(std::string_view value, DeviceEnv& settings, std::string& allowed) {
  allowed = "normal or high";
  settings.streamPriority = value == "high" ? StreamPriority::kHigh : StreamPriority::kNormal;
  return value == "high" || value == "normal";
}

constexpr EnvEntry<DeviceEnv> kTable[] = {
    {{"MOONCAKE_PEER_MEMORY", "17179869184",
      "Bytes that a process allocates on a device to share with processes of its host, and that it "
      "maps of each of them"},
     numberInto<&DeviceEnv::peerMemory, 0, uint64_t(1) << 48>},
    {{"MOONCAKE_STREAM_PRIORITY", "normal",
      "Priority of the streams of groups: normal, or high, so that their kernels run before the "
      "waiting blocks of the program's"},
     parsePriority},
};

}  // namespace

Result<DeviceEnv> DeviceEnv::read() { return readEnv(kTable); }

std::vector<EnvVariable> DeviceEnv::variables() { return variablesOf(kTable); }

}  // namespace mooncake
