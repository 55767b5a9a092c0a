#include "streams.h"

#include <array>
#include <atomic>
#include <mutex>

#include <c10/util/Exception.h>

namespace fake_device {

namespace {

constexpr size_t kPool = 8;  // streams of each priority

struct Pool {
  std::array<void*, kPool> handles{};  // null: not created yet
  size_t next = 0;
};

struct Pools {
  std::mutex mutex;
  std::array<std::array<Pool, 2>, kDevices> of;  // by device and priority
};

// Never destroyed: threads may use streams while the process exits.
Pools& pools() {
  static auto* const all = new Pools;
  return *all;
}

std::atomic<bool> areHidden{false};
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
  const std::lock_guard lock(pools().mutex);
  Pool& pool = pools().of[device][highPriority];
  void*& handle = pool.handles[pool.next];
  if (handle == nullptr) handle = valueOf(devices().createStream(device)).handle;
  pool.next = (pool.next + 1) % kPool;
  return streamNumber(device, reinterpret_cast<c10::StreamId>(handle));
}

mooncake::DeviceStream nativeStream(const c10::Stream& stream) {
  return {stream.device_index(), reinterpret_cast<void*>(stream.id())};
}

bool tellsHandles() { return !areHidden; }

void hideHandles() { areHidden = true; }

void enqueue(const c10::Stream& stream, std::function<void()> work) {
  check(devices().enqueue(nativeStream(stream), [work = std::move(work)]() noexcept { work(); }));
}

}  // namespace fake_device
