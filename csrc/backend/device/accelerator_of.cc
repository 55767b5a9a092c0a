#include "backend/device/accelerator_of.h"

#include <string>

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include "backend/arguments.h"
#include "backend/device/capture_probe.h"
#include "backend/errors.h"
#include "device/accelerators.h"

namespace mooncake {
namespace {

// torch tells the vendor's handle of a stream since 2.10 or so, where the device's part of torch
// does.
template <typename Stream>
bool readHandle(const Stream& stream, void*& handle) {
  if constexpr (requires { stream.native_handle(); }) {
    try {
      handle = stream.native_handle();
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }
  return false;
}

}  // namespace

Result<Accelerator*> acceleratorOf(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) return openAccelerator("cuda");
  if (type == c10::DeviceType::PrivateUse1 && c10::get_privateuse1_backend() == "fake")
    return openAccelerator("fake");
  return {ErrorCode::kUnsupported, "no accelerator of this library drives devices of type " +
                                       c10::DeviceTypeName(type, /*lower_case=*/true)};
}

Result<DeviceStream> nativeStream(const c10::Stream& stream) {
  DeviceStream native{.device = stream.device_index(), .handle = nullptr};
  if (!readHandle(stream, native.handle))
    return {ErrorCode::kUnsupported, "this torch does not tell the handles of streams"};
  return native;
}

bool isCapturing(const c10::Stream& stream) {
  const auto accelerator = acceleratorOf(stream.device_type());
  if (!accelerator.ok()) return false;
  const auto native = nativeStream(stream);
  if (native.ok()) return orThrow((*accelerator)->isCapturing(*native));
  return CaptureProbe::of(stream.device()).isCapturing(stream);
}

void refuseCapture(const c10::Stream& stream, const char* why) {
  if (isCapturing(stream)) refuseRecording(stream, why, kOutsideOfCapture);
}

void refuseRecording(const c10::Stream& stream, const std::string& why, const std::string& remedy) {
  throwError({ErrorCode::kUnsupported, "the stream of " + stream.device().str() +
                                           " is being recorded into a graph, and " + why + ". " +
                                           remedy});
}

}  // namespace mooncake
