#include "backend/device/staging_streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "backend/device/host_staging.h"
#include "backend/device/stream_staging.h"

namespace mooncake {

bool isStaged(const c10::Device& device) {
  return !device.is_cpu() && !device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type());
}

std::shared_ptr<Staging> StagingStreams::stagingOn(const c10::Device& device) {
  const auto streams = on(device);
  if (streams->words()) return std::make_shared<StreamStaging>(streams, limit_);
  return std::make_shared<HostStaging>(streams, streams->collectives(), limit_);
}

std::shared_ptr<GroupStreams> StagingStreams::on(const c10::Device& device) {
  Lock lock(mutex_);
  auto& streams = streams_[{device.type(), device.index()}];
  if (!streams) streams = std::make_shared<GroupStreams>(device, settings_);
  return streams;
}

}  // namespace mooncake
