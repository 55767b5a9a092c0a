#include "backend/device/device_scope.h"

#include "backend/device/accelerator_of.h"

namespace mooncake {
namespace {

Accelerator* knownDriver(const c10::Device& device) {
  const auto accelerator = acceleratorOf(device.type());
  return accelerator.ok() ? *accelerator : nullptr;
}

}  // namespace

DeviceScope::DeviceScope(const c10::Device& device)
    : device_(device),
      accelerator_(knownDriver(device)),
      before_(accelerator_ ? accelerator_->exchangeCaptureMode(CaptureMode::kRelaxed)
                           : CaptureMode::kGlobal) {}

DeviceScope::~DeviceScope() {
  if (accelerator_) accelerator_->exchangeCaptureMode(before_);
}

}  // namespace mooncake
