#include "backend/device/staging_streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/device/host_staging.h"
#include "backend/device/stream_staging.h"

namespace mooncake {

bool isStaged(const c10::Device& device) {
  return !device.is_cpu() && !device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type());
}

std::shared_ptr<Staging> StagingStreams::stagingOn(const c10::Device& device) {
  const Entry& entry = on(device);
  if (entry.words) return std::make_shared<StreamStaging>(entry.stream, limit_, entry.words);
  return std::make_shared<HostStaging>(entry.stream, limit_);
}

const StagingStreams::Entry& StagingStreams::on(const c10::Device& device) {
  std::lock_guard lock(mutex_);
  const auto key = std::make_pair(device.type(), device.index());
  const auto known = entries_.find(key);
  if (known != entries_.end()) return known->second;
  const c10::impl::VirtualGuardImpl guard(device.type());
  Entry entry{.stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true),
              .words = nullptr};
  if (usesWords_) entry.words = orThrow(StreamWords::make(entry.stream));
  return entries_.emplace(key, std::move(entry)).first->second;
}

}  // namespace mooncake
