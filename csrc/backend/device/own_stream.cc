#include "backend/device/own_stream.h"

#include <mutex>
#include <optional>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "base/log.h"

namespace mooncake {
namespace {

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

StreamQueues* queuesOf(const c10::Device& device, Accelerator* accelerator) {
  return accelerator ? orThrow(accelerator->streamQueues(device.index())) : nullptr;
}

c10::Stream streamOn(const c10::Device& device, StreamQueues* queues, StreamRole role,
                     std::optional<DeviceStream> programs = std::nullopt) {
  if (queues) return OwnStream::named(device, orThrow(queues->take(role, programs)));
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

std::optional<DeviceStream> optional(const Result<DeviceStream>& stream) {
  return stream.ok() ? std::optional(*stream) : std::nullopt;
}

}  // namespace

OwnStream::OwnStream(const c10::Device& device, StreamRole role)
    : accelerator_(driverOf(device)),
      queues_(queuesOf(device, accelerator_)),
      stream_(streamOn(device, queues_, role)) {}

// Older torch does not tell the program's stream.
OwnStream::OwnStream(const c10::Device& device, StreamRole role, const c10::Stream& programs)
    : accelerator_(driverOf(device)),
      queues_(queuesOf(device, accelerator_)),
      stream_(streamOn(device, queues_, role, optional(nativeStream(programs)))) {}

OwnStream::OwnStream(const c10::Device& device, const DeviceStream& taken)
    : accelerator_(driverOf(device)),
      queues_(queuesOf(device, accelerator_)),
      stream_(named(device, taken)) {}

OwnStream::~OwnStream() {
  // A lock of the queues may be held for ever in a child.
  if (queues_ && forkGeneration_ == forkGeneration()) queues_->giveBack(native());
}

// torch knows a stream that it did not make by its handle.
c10::Stream OwnStream::named(const c10::Device& device, const DeviceStream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(stream.handle));
}

DeviceStream OwnStream::nativeOf(const c10::Stream& stream) {
  return {.device = stream.device_index(), .handle = reinterpret_cast<void*>(stream.id())};
}

bool OwnStream::isCapturing(const c10::Stream& stream) {
  const auto accelerator = acceleratorOf(stream.device_type());
  return accelerator.ok() && orThrow((*accelerator)->isCapturing(nativeOf(stream)));
}

}  // namespace mooncake
