#pragma once

#include <c10/core/Stream.h>

#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Returns the accelerator that drives torch's devices of the type. kUnsupported: none does.
Result<Accelerator*> acceleratorOf(c10::DeviceType type);
// Returns the stream as its accelerator knows it. kUnsupported: this torch does not tell handles.
Result<DeviceStream> nativeStream(const c10::Stream& stream);
// Throws if the stream's calls are being recorded into a graph. `what` follows "and" in the error.
void refuseCapture(const c10::Stream& stream, const char* what);

}  // namespace mooncake
