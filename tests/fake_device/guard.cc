#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "event.h"
#include "streams.h"

namespace fake_device {

namespace {

// The devices, streams and events of the device type, for torch. Stateless.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return c10::Device(kType, currentDevice()); }
  void setDevice(c10::Device device) const override { setCurrentDevice(indexOf(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return currentStream(indexOf(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return defaultStream(indexOf(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool isHighPriority) const override {
    return poolStream(indexOf(device), isHighPriority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return poolStream(indexOf(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = currentStream(stream.device_index());
    setCurrentStream(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    check(devices().enterUnsafe("queryStream"));
    return devices().isIdle(nativeStream(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check(devices().enterUnsafe("synchronizeStream"));
    check(devices().synchronize(nativeStream(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check(devices().enterUnsafe("synchronizeDevice"));
    check(devices().synchronizeDevice(device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    allocator().recordUse(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) {
      const auto place = device < 0 ? stream.device_index() : device;
      *event = new Event(place, flag == c10::EventFlag::BACKEND_DEFAULT);
    }
    eventOf(*event)->record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) eventOf(event)->block(stream);
  }
  bool queryEvent(void* event) const override {
    check(devices().enterUnsafe("queryEvent"));
    return !event || eventOf(event)->hasHappened();
  }
  void synchronizeEvent(void* event) const override {
    check(devices().enterUnsafe("synchronizeEvent"));
    if (event) eventOf(event)->synchronize();
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return eventOf(start)->millisecondsUntil(*eventOf(end));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete eventOf(event);
  }

  // These lack `override`, because older torches do not declare them.
  void* getStreamNativeHandle(const c10::Stream stream) const {
    TORCH_CHECK(tellsHandles(), "fake device: a test hides the handles of streams");
    return nativeStream(stream).handle;
  }
  bool isStreamCapturing(const c10::Stream& stream) const {
    return valueOf(devices().isCapturing(nativeStream(stream)));
  }

 private:
  static c10::DeviceIndex indexOf(c10::Device device) {
    return device.has_index() ? device.index() : currentDevice();
  }
  static Event* eventOf(void* event) { return static_cast<Event*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

}  // namespace fake_device
