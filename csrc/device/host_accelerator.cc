#include "device/host_accelerator.h"

#include <cstring>

namespace mooncake {
namespace {

Error noDevice(const char* call) {
  return {ErrorCode::kUnsupported,
          std::string(call) + " needs a device, and accelerator \"host\" has none"};
}

}  // namespace

Result<std::string> HostAccelerator::describe(int) {
  return std::string("host memory, without devices");
}

Result<MemoryPlace> HostAccelerator::placeOf(const void*) { return MemoryPlace{}; }

Result<std::span<std::byte>> HostAccelerator::allocatePinned(size_t) {
  return noDevice("allocatePinned");
}

void HostAccelerator::freePinned(std::span<std::byte>) {}

Result<DeviceStream> HostAccelerator::createStream(int, StreamPriority) {
  return noDevice("createStream");
}

void HostAccelerator::destroyStream(DeviceStream) {}

Status HostAccelerator::synchronize(DeviceStream) { return noDevice("synchronize"); }

Result<std::unique_ptr<DeviceEvent>> HostAccelerator::createEvent(int) {
  return noDevice("createEvent");
}

Status HostAccelerator::copy(DeviceStream, void* to, const void* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
  return {};
}

bool HostAccelerator::hasStreamWords(int) const { return false; }

Status HostAccelerator::writeWord(DeviceStream, StreamWord*, uint32_t) {
  return noDevice("writeWord");
}

Status HostAccelerator::awaitWord(DeviceStream, StreamWord*, uint32_t) {
  return noDevice("awaitWord");
}

Result<bool> HostAccelerator::isCapturing(DeviceStream) { return noDevice("isCapturing"); }

Status HostAccelerator::prepareKernels(int) { return noDevice("prepareKernels"); }

Result<KernelRoom> HostAccelerator::roomFor(const KernelLaunch&, int) {
  return noDevice("roomFor");
}

Status HostAccelerator::launch(DeviceStream, const KernelLaunch&) { return noDevice("launch"); }

Result<ExportedMemory> HostAccelerator::exportMemory(const void*) {
  return noDevice("exportMemory");
}

Result<void*> HostAccelerator::importMemory(const ExportedMemory&, int) {
  return noDevice("importMemory");
}

Status HostAccelerator::closeMemory(void*) { return noDevice("closeMemory"); }

}  // namespace mooncake
