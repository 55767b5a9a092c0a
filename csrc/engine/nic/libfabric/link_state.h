#pragma once

#include <string>

namespace mooncake {

// Whether the link of one device is there, from sysfs: a software provider over TCP says nothing
// of a cable that was pulled, and waits.
class LinkState {
 public:
  // Neither a network interface nor an RDMA device: always up.
  explicit LinkState(const std::string& device, const std::string& sysfs = "/sys");

  bool isDown() const;

 private:
  std::string path_;
};

}  // namespace mooncake
