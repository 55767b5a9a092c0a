#include "backend/device/own_stream.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "base/log.h"

namespace mooncake {
namespace {

// Streams that no owner has, by device.
struct FreeStreams {
  std::mutex mutex;  // guards byDevice
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::vector<c10::Stream>> byDevice;
};

FreeStreams& freeStreams() {
  static auto* const all = new FreeStreams;  // owners may live until the process ends
  return *all;
}

std::pair<c10::DeviceType, c10::DeviceIndex> keyOf(const c10::Device& device) {
  return {device.type(), device.index()};
}

// Null: torch alone drives the device.
Accelerator* driverOf(const c10::Device& device) {
  const auto accelerator = acceleratorOf(device.type());
  if (accelerator.ok()) return *accelerator;
  static std::once_flag isTold;
  std::call_once(isTold, [&] {
    log(LogLevel::kWarning, device.str(),
        "wait() will wait on the host: ", accelerator.error().message);
  });
  return nullptr;
}

c10::Stream streamOn(const c10::Device& device, Accelerator* accelerator) {
  if (!accelerator) {
    return c10::impl::VirtualGuardImpl(device.type())
        .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  FreeStreams& free = freeStreams();
  {
    std::lock_guard lock(free.mutex);
    auto& known = free.byDevice[keyOf(device)];
    if (!known.empty()) {
      const c10::Stream stream = known.back();
      known.pop_back();
      return stream;
    }
  }
  const DeviceStream made = orThrow(accelerator->createStream(device.index()));
  // torch knows a stream that it did not make by its handle.
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(made.handle));
}

bool isIdle(const c10::Stream& stream) try {
  const c10::DeviceGuard on(stream.device());
  return c10::impl::VirtualGuardImpl(stream.device_type()).queryStream(stream);
} catch (const std::exception&) {  // of torch: the context is lost
  return false;
}

}  // namespace

OwnStream::OwnStream(const c10::Device& device)
    : accelerator_(driverOf(device)), stream_(streamOn(device, accelerator_)) {}

OwnStream::~OwnStream() {
  if (!accelerator_ || !isIdle(stream_)) return;
  FreeStreams& free = freeStreams();
  std::lock_guard lock(free.mutex);
  free.byDevice[keyOf(stream_.device())].push_back(stream_);
}

DeviceStream OwnStream::nativeOf(const c10::Stream& stream) {
  return {.device = stream.device_index(), .handle = reinterpret_cast<void*>(stream.id())};
}

}  // namespace mooncake
