#include "streams.h"

#include <array>
#include <mutex>

#include <c10/util/Exception.h>

namespace fake_device {

namespace {

constexpr c10::StreamId kPool = 8;  // streams of each priority

struct DeviceStreams {
  std::array<void*, 1 + 2 * kPool> handles{};  // by number; null: not created yet
  std::array<c10::StreamId, 2> next{};         // by priority
};

struct Streams {
  std::mutex mutex;
  std::array<DeviceStreams, kDevices> of;
};

// Never destroyed: threads may use streams while the process exits.
Streams& streams() {
  static auto* const all = new Streams;
  return *all;
}

thread_local c10::DeviceIndex deviceOfThread = 0;
thread_local std::array<c10::StreamId, kDevices> streamsOfThread{};

c10::Stream streamNumber(c10::DeviceIndex device, c10::StreamId number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), number);
}

void checkIndex(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "fake device: no device ", int(device),
              ", only 0 to ", kDevices - 1);
}

}  // namespace

c10::DeviceIndex currentDevice() { return deviceOfThread; }

void setCurrentDevice(c10::DeviceIndex device) {
  checkIndex(device);
  deviceOfThread = device;
}

c10::Stream currentStream(c10::DeviceIndex device) {
  checkIndex(device);
  return streamNumber(device, streamsOfThread[device]);
}

void setCurrentStream(const c10::Stream& stream) {
  checkIndex(stream.device_index());
  streamsOfThread[stream.device_index()] = stream.id();
}

c10::Stream defaultStream(c10::DeviceIndex device) {
  checkIndex(device);
  return streamNumber(device, 0);
}

c10::Stream poolStream(c10::DeviceIndex device, bool highPriority) {
  checkIndex(device);
  const std::lock_guard lock(streams().mutex);
  c10::StreamId& next = streams().of[device].next[highPriority];
  const c10::StreamId number = 1 + highPriority * kPool + next;
  next = (next + 1) % kPool;
  return streamNumber(device, number);
}

mooncake::DeviceStream nativeStream(const c10::Stream& stream) {
  const c10::DeviceIndex device = stream.device_index();
  checkIndex(device);
  const std::lock_guard lock(streams().mutex);
  auto& handles = streams().of[device].handles;
  TORCH_CHECK(stream.id() >= 0 && stream.id() < c10::StreamId(handles.size()),
              "fake device: no stream ", stream.id());
  void*& handle = handles[stream.id()];
  if (handle == nullptr) {
    handle = stream.id() == 0 ? devices().defaultStream(device).handle
                              : valueOf(devices().createStream(device)).handle;
  }
  return {device, handle};
}

void enqueue(const c10::Stream& stream, std::function<void()> work) {
  check(devices().enqueue(nativeStream(stream), [work = std::move(work)]() noexcept { work(); }));
}

}  // namespace fake_device
