#include "kernels.h"

#include <atomic>
#include <cstring>
#include <functional>

#include "kernels/copy_rows.cuh"
#include "kernels/entries.cuh"
#include "kernels/ep/entries.cuh"
#include "kernels/kernel_id.h"
#include "kernels/probe.cuh"
#include "kernels/signals.cuh"
#include "tests/simt/world.h"

namespace fake_device {
namespace {

using mooncake::KernelLaunch;
using mooncake::Status;
using namespace mooncake::kernels;

using Entry = std::function<void(const std::byte* arguments)>;

template <typename Arguments>
Entry entry(void (*kernel)(Arguments)) {
  return [kernel](const std::byte* bytes) {
    Arguments arguments;
    std::memcpy(&arguments, bytes, sizeof(arguments));
    kernel(arguments);
  };
}

// In the order of KernelId.
const Entry kEntries[] = {
    entry(mooncake_probe),
    entry(mooncake_acknowledge),
    entry(mooncake_move),
    entry(mooncake_all_to_all),
    entry(mooncake_reduce_uint8),
    entry(mooncake_reduce_int8),
    entry(mooncake_reduce_uint16),
    entry(mooncake_reduce_int16),
    entry(mooncake_reduce_uint32),
    entry(mooncake_reduce_int32),
    entry(mooncake_reduce_uint64),
    entry(mooncake_reduce_int64),
    entry(mooncake_reduce_float16),
    entry(mooncake_reduce_bfloat16),
    entry(mooncake_reduce_float32),
    entry(mooncake_reduce_float64),
    entry(mooncake_reduce_bool),
    entry(mooncake_reduce_complex64),
    entry(mooncake_reduce_complex128),
    entry(mooncake_signal),
    entry(mooncake_dispatch_send),
    entry(mooncake_dispatch_receive),
    entry(mooncake_combine_send),
    entry(mooncake_combine_receive),
    entry(mooncake_dispatch_tokens),
    entry(mooncake_combine_tokens),
    entry(mooncake_copy_rows),
};
static_assert(std::size(kEntries) == mooncake::kKernelCount);

std::atomic<uint64_t> launches = 0, blocks = 0;

Status run(const KernelLaunch& launch) {
  ++launches;
  blocks += launch.grid;
  using namespace mooncake::simt;
  World world({.starveFor = 0, .realTime = true});
  const Entry& kernel = kEntries[size_t(launch.kernel)];
  world.launch(0, 0, kernelName(launch.kernel), {launch.grid}, {launch.block}, launch.sharedBytes,
               [&] { kernel(launch.arguments.data()); });
  const Report report = world.run();
  if (report.ok) return {};
  return {mooncake::ErrorCode::kSystem, report.problem};
}

}  // namespace

uint64_t kernelsRun() { return launches; }
uint64_t blocksRun() { return blocks; }

void giveKernels(mooncake::FakeDevices& devices) {
  devices.setKernels(
      {.run = [](mooncake::DeviceStream, const KernelLaunch& launch) { return run(launch); }});
}

}  // namespace fake_device
