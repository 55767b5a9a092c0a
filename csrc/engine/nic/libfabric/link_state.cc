#include "engine/nic/libfabric/link_state.h"

#include <filesystem>
#include <fstream>

namespace mooncake {

LinkState::LinkState(const std::string& device, const std::string& sysfs) {
  if (device.empty() || device.find('/') != std::string::npos) return;
  std::error_code error;
  for (const std::string& path : {sysfs + "/class/net/" + device + "/operstate",
                                  sysfs + "/class/infiniband/" + device + "/ports/1/state"}) {
    if (std::filesystem::exists(path, error)) path_ = path;
  }
}

bool LinkState::isDown() const {
  if (path_.empty()) return false;
  std::ifstream file(path_);
  std::string state;
  // A device that has gone altogether has no file any more.
  if (!std::getline(file, state)) return true;
  // operstate's "unknown" is what loopback and tunnels say; a port says "1: DOWN" or "4: ACTIVE".
  return state == "down" || state == "lowerlayerdown" || state == "notpresent" ||
         state.starts_with("1:") || state.starts_with("0:");
}

}  // namespace mooncake
