#include "devices.h"

#include <atomic>

#include <c10/util/Exception.h>

namespace fake_device {

namespace {
std::atomic<mooncake::FakeDevices*> attached = nullptr;
}

mooncake::FakeDevices& devices() {
  mooncake::FakeDevices* const found = attached;
  TORCH_CHECK(found, "fake device: import the Python package fake_device first");
  return *found;
}

void attach(mooncake::FakeDevices* devices) {
  TORCH_CHECK(devices->deviceCount() == kDevices, "fake device: ", devices->deviceCount(),
              " devices in this process, not ", kDevices);
  attached = devices;
}

void check(const mooncake::Status& status) {
  TORCH_CHECK(status.ok(), "fake device: ", status.error().message);
}

}  // namespace fake_device
