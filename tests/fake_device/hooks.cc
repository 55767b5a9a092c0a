#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "generator.h"
#include "pinned.h"
#include "storage.h"
#include "streams.h"

namespace fake_device {

namespace {

// The functions that torch asks of an accelerator. Stateless.
class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return currentDevice(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    fake_device::setCurrentDevice(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = currentDevice();
    fake_device::setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? currentDevice() : exchangeDevice(device);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinnedAllocator(); }
  bool isPinnedPtr(const void* address) const override {
    return valueOf(devices().placeOf(address)).kind == mooncake::MemoryKind::kPinned;
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    const mooncake::MemoryPlace place = valueOf(devices().placeOf(address));
    TORCH_CHECK(place.kind == mooncake::MemoryKind::kDevice,
                "fake device: the address is not of a device's memory");
    return c10::Device(kType, c10::DeviceIndex(place.device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resizeStorage(storage, bytes);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return defaultGenerator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device);
  }
};

const bool areHooksRegistered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

}  // namespace fake_device
