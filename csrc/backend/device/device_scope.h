#pragma once

#include <memory>

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include "device/accelerator.h"

namespace mooncake {

// Makes a device the thread's current one, and lets the thread ask for events and wait for streams
// while another thread captures a graph: otherwise that spoils the capture (cudaEventQuery). Undoes
// both at its end. For work that belongs to no capture.
class DeviceScope {
 public:
  explicit DeviceScope(const c10::Device& device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const c10::DeviceGuard device_;
  Accelerator* const accelerator_;  // null: torch alone drives the device
  const CaptureMode before_;
};

}  // namespace mooncake
