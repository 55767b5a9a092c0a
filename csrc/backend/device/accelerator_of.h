#pragma once

#include <string>

#include <c10/core/Stream.h>

#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Returns the accelerator that drives torch's devices of the type. kUnsupported: none does.
Result<Accelerator*> acceleratorOf(c10::DeviceType type);
// Returns the stream as its accelerator knows it. kUnsupported: this torch does not tell handles.
Result<DeviceStream> nativeStream(const c10::Stream& stream);
// Whether the calls of a stream of the program are being recorded into a graph. Throws the
// accelerator's errors. OwnStream::isCapturing() is for streams of this library.
bool isCapturing(const c10::Stream& stream);
// Throws if the stream's calls are being recorded into a graph. `why` follows "and" in the error.
void refuseCapture(const c10::Stream& stream, const char* why);
// Throws that error. The remedy is a sentence without its full stop.
[[noreturn]] void refuseRecording(const c10::Stream& stream, const std::string& why,
                                  const std::string& remedy);
inline constexpr const char* kOutsideOfCapture = "Call it outside of the capture";

}  // namespace mooncake
