#include "backend/device/capture_probe.h"

#include <map>
#include <utility>

#include "backend/arguments.h"
#include "backend/device/device_scope.h"
#include "backend/device/stream_mark.h"

namespace mooncake {

CaptureProbe& CaptureProbe::of(const c10::Device& device) {
  static Mutex mutex;
  static auto* const probes PT_GUARDED_BY(mutex) =
      new std::map<std::pair<c10::DeviceType, int>, CaptureProbe>;
  Lock lock(mutex);
  return (*probes)[{device.type(), device.index()}];
}

const OwnStream& CaptureProbe::freeStream(const c10::Device& device) {
  for (const auto& stream : streams_)
    if (!stream->isCapturing()) return *stream;
  // The stream waits for work of the program.
  return *streams_.emplace_back(std::make_unique<OwnStream>(device, StreamRole::kFollows));
}

bool CaptureProbe::isCapturing(const c10::Stream& stream) {
  const DeviceScope on(stream.device());
  Lock lock(mutex_);
  const OwnStream& ours = freeStream(stream.device());
  placeBehind(ours.stream(), stream);
  if (!ours.isCapturing()) return false;
  // A capture cannot end before the streams that have joined it come back.
  placeBehind(stream, ours.stream());
  return true;
}

}  // namespace mooncake
