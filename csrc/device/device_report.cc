#include "device/device_report.h"

#include <map>

#include "device/peer_memory.h"

namespace mooncake {
namespace {

const char* textOf(DeviceWay way) {
  switch (way) {
    case DeviceWay::kPeerAccess:
      return "peer access";
    case DeviceWay::kHostMemory:
      return "shared host memory";
    case DeviceWay::kEngine:
      return "the engine";
  }
  return "";
}

// "peer access to 0, 1; shared host memory to 2"
Result<std::string> waysFrom(Accelerator& accelerator, bool hasKernels, int device) {
  std::map<DeviceWay, std::string> peers;
  for (int peer = 0; peer < accelerator.deviceCount(); ++peer) {
    const auto way = wayBetween(accelerator, hasKernels, device, peer);
    if (!way.ok()) return way.error();
    std::string& list = peers[*way];
    list += (list.empty() ? "" : ", ") + std::to_string(peer);
  }
  std::string text;
  for (const auto& [way, list] : peers)
    text += (text.empty() ? "" : "; ") + std::string(textOf(way)) + " to " + list;
  return text;
}

DeviceFinding findingOf(Accelerator& accelerator, bool hasKernels, int device) {
  DeviceFinding found{.subject =
                          std::string(accelerator.name()) + " device " + std::to_string(device)};
  const auto name = accelerator.describe(device);
  const auto ways = waysFrom(accelerator, hasKernels, device);
  for (const Status& status : {name.status(), ways.status()}) {
    if (status.ok()) continue;
    found.text = status.error().message;
    return found;
  }
  const Status shares = accelerator.peerMemory()->checkSharing(device);
  found.works = shares.ok();
  found.text = *name + "; between processes: " + *ways + "; network cards: " +
               (accelerator.ordersCardWrites(device) ? "kernels see their writes in order"
                                                     : "they read back what they write");
  if (!shares.ok()) found.text += ". " + shares.error().message;
  return found;
}

}  // namespace

Result<DeviceWay> wayBetween(Accelerator& accelerator, bool hasKernels, int device, int peer) {
  if (!hasKernels) return DeviceWay::kEngine;
  PeerMemory& memory = *accelerator.peerMemory();
  for (const auto& [from, to] : {std::pair(device, peer), std::pair(peer, device)}) {
    const Status shares = memory.checkSharing(from);
    if (!shares.ok() && shares.code() != ErrorCode::kUnsupported) return shares.error();
    const auto reaches = memory.canAccessPeer(from, to);
    if (!reaches.ok()) return reaches.error();
    if (!shares.ok() || !*reaches) return DeviceWay::kHostMemory;
  }
  return DeviceWay::kPeerAccess;
}

std::vector<DeviceFinding> reportDevices(Accelerator& accelerator, bool hasKernels) {
  std::vector<DeviceFinding> findings;
  const auto driver = accelerator.describe(-1);
  findings.push_back({.works = driver.ok(),
                      .subject = std::string(accelerator.name()) + " devices",
                      .text = driver.ok()
                                  ? std::to_string(accelerator.deviceCount()) + ", " + *driver
                                  : driver.error().message});
  for (int device = 0; device < accelerator.deviceCount(); ++device)
    findings.push_back(findingOf(accelerator, hasKernels, device));
  return findings;
}

}  // namespace mooncake
