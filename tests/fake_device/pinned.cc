#include "pinned.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "devices.h"

namespace fake_device {

namespace {

struct Given {
  std::mutex mutex;
  std::unordered_map<void*, std::span<std::byte>> byAddress;
};

Given& given() {
  static auto* const all = new Given;
  return *all;
}

void release(void* address) {
  std::unique_lock lock(given().mutex);
  auto memory = given().byAddress.extract(address);
  lock.unlock();
  if (memory) devices().freePinned(memory.mapped());
}

}  // namespace

c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  const auto memory = valueOf(devices().allocatePinned(std::max<size_t>(bytes, 1)));
  const std::lock_guard lock(given().mutex);
  given().byAddress[memory.data()] = memory;
  return {memory.data(), memory.data(), &release, c10::Device(c10::kCPU)};
}

c10::DeleterFnPtr PinnedAllocator::raw_deleter() const { return &release; }

void PinnedAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  default_copy_data(to, from, bytes);
}

PinnedAllocator& pinnedAllocator() {
  static auto* const one = new PinnedAllocator;
  return *one;
}

}  // namespace fake_device
