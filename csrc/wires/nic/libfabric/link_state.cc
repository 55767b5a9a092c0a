#include "wires/nic/libfabric/link_state.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

namespace mooncake {
namespace {

ifreq requestFor(const std::string& interface) {
  ifreq request{};
  std::memcpy(request.ifr_name, interface.data(), interface.size());
  return request;
}

}  // namespace

LinkState::LinkState(const std::string& device, const std::string& sysfs) {
  if (device.empty() || device.find('/') != std::string::npos) return;
  if (device.size() < IFNAMSIZ) {
    socket_ = Fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq request = requestFor(device);
    if (socket_ && ::ioctl(socket_.get(), SIOCGIFINDEX, &request) == 0) {
      interface_ = device;
      return;
    }
  }
  std::error_code error;
  const std::string path = sysfs + "/class/infiniband/" + device + "/ports/1/state";
  if (std::filesystem::exists(path, error)) path_ = path;
}

bool LinkState::isDown() const {
  if (!interface_.empty()) return isInterfaceDown();
  if (path_.empty()) return false;
  std::ifstream file(path_);
  std::string state;
  // A device that is gone has no file any more. A port says "1: DOWN" or "4: ACTIVE".
  return !std::getline(file, state) || state.starts_with("1:") || state.starts_with("0:");
}

bool LinkState::isInterfaceDown() const {
  ifreq request = requestFor(interface_);
  if (::ioctl(socket_.get(), SIOCGIFFLAGS, &request) != 0) return errno == ENODEV;
  // Loopback and tunnels count as running, because they have no link state.
  return (request.ifr_flags & IFF_UP) == 0 || (request.ifr_flags & IFF_RUNNING) == 0;
}

}  // namespace mooncake
