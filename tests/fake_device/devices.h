#pragma once

#include <utility>

#include <c10/core/DeviceType.h>

#include "device/fake/fake_devices.h"

// torch's device type "fake", for tests. Memory, streams and events are those of the fake devices
// that mooncake_backend._C has in this process, so the product's code and torch share them.
namespace fake_device {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

// Returns the devices given to attach(). Raises an error before that.
mooncake::FakeDevices& devices();
void attach(mooncake::FakeDevices* devices);

// Raises the error as torch's.
void check(const mooncake::Status& status);

template <typename T>
T valueOf(mooncake::Result<T> result) {
  check(result.status());
  return std::move(*result);
}

}  // namespace fake_device
