#pragma once

#include <functional>

#include <c10/core/Stream.h>

#include "devices.h"

// torch's streams. A stream's number is its handle, so any stream of the devices is one of torch's,
// too. Number 0 is a device's default stream.
namespace fake_device {

// The current device and the current stream of each device are the thread's own.
c10::DeviceIndex currentDevice();
void setCurrentDevice(c10::DeviceIndex device);
c10::Stream currentStream(c10::DeviceIndex device);
void setCurrentStream(const c10::Stream& stream);

c10::Stream defaultStream(c10::DeviceIndex device);
// Returns one of 8 streams, in turn: a ninth caller shares the first one's stream. Each is created
// when it is first given out.
c10::Stream poolStream(c10::DeviceIndex device, bool highPriority);

mooncake::DeviceStream nativeStream(const c10::Stream& stream);
// Whether torch may know the devices' names of streams. hideHandles() is for good.
bool tellsHandles();
void hideHandles();

// Enqueues work, which owns no tensor of the program: the last reference to one may need Python's
// lock, and a thread that waits for the stream may hold it. An exception in it ends the process.
void enqueue(const c10::Stream& stream, std::function<void()> work);

}  // namespace fake_device
