#pragma once

#include <string>

#include "base/fd.h"

namespace mooncake {

// Tells whether one device has a link. A software provider over TCP does not report a pulled cable,
// and waits. For a network interface the kernel is asked, because a container's sysfs may show
// another network namespace. For an RDMA device sysfs is read.
class LinkState {
 public:
  // A device that is neither a network interface nor an RDMA device counts as up.
  explicit LinkState(const std::string& device, const std::string& sysfs = "/sys");

  bool isDown() const;

 private:
  bool isInterfaceDown() const;

  std::string interface_;  // empty: it is no interface
  Fd socket_;              // in the network namespace of the interface
  std::string path_;       // empty: it is no RDMA device
};

}  // namespace mooncake
