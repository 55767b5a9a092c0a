#pragma once

#include <string>

#include "base/fd.h"

namespace mooncake {

// Whether the link of one device is there: a software provider over TCP says nothing of a cable
// that was pulled, and waits. Of an interface the kernel is asked, since the sysfs that a container
// sees may be that of another network namespace; of an RDMA device sysfs.
class LinkState {
 public:
  // Neither a network interface nor an RDMA device: always up.
  explicit LinkState(const std::string& device, const std::string& sysfs = "/sys");

  bool isDown() const;

 private:
  bool isInterfaceDown() const;

  std::string interface_;  // empty: it is none
  Fd socket_;              // of the namespace that the interface is in
  std::string path_;       // empty: it is no RDMA device
};

}  // namespace mooncake
