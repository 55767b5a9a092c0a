#pragma once

#include <functional>

#include <c10/core/Stream.h>

#include "devices.h"

// torch's streams. Number 0 is a device's default stream; the others come from a pool, and each is
// created when it is first given out.
namespace fake_device {

// The current device and the current stream of each device are the thread's own.
c10::DeviceIndex currentDevice();
void setCurrentDevice(c10::DeviceIndex device);
c10::Stream currentStream(c10::DeviceIndex device);
void setCurrentStream(const c10::Stream& stream);

c10::Stream defaultStream(c10::DeviceIndex device);
// Returns one of 8 streams, in turn: a ninth caller shares the first one's stream.
c10::Stream poolStream(c10::DeviceIndex device, bool highPriority);

mooncake::DeviceStream nativeStream(const c10::Stream& stream);

// Enqueues work, which owns no tensor of the program: the last reference to one may need Python's
// lock, and a thread that waits for the stream may hold it. An exception in it ends the process.
void enqueue(const c10::Stream& stream, std::function<void()> work);

}  // namespace fake_device
