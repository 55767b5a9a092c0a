#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace mooncake {

enum class KernelId : uint32_t;  // kernels/kernel_id.h

// One launch of a kernel of this library.
struct KernelLaunch {
  KernelId kernel{};
  uint32_t grid = 1;                     // blocks
  uint32_t block = 1;                    // threads of each block
  uint32_t sharedBytes = 0;              // dynamic shared memory of each block
  bool isCooperative = false;            // all blocks run at once, or the launch fails
  std::span<const std::byte> arguments;  // the kernel's one parameter, a struct; launch() copies it
};

// The kernel's parameter as launch() takes it. `arguments` must live until launch() returns.
template <typename Arguments>
std::span<const std::byte> bytesOf(const Arguments& arguments) {
  return std::as_bytes(std::span(&arguments, 1));
}

// Room for a kernel on a device.
struct KernelRoom {
  int multiprocessors = 0;
  int blocksEach = 0;  // that run at once on one of them

  int blocks() const { return multiprocessors * blocksEach; }
};

}  // namespace mooncake
