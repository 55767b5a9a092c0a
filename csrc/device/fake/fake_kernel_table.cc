#include "device/fake/fake_kernel_table.h"

#include <string>
#include <utility>
#include <vector>

#include "kernels/kernel_id.h"

namespace mooncake {
namespace {

Error refused(const KernelLaunch& launch, const std::string& cause) {
  return {ErrorCode::kInvalidArgument,
          std::string("kernel ") + kernelName(launch.kernel) + ": " + cause};
}

}  // namespace

void FakeKernelTable::set(FakeKernels kernels) {
  Lock lock(mutex_);
  kernels_ = kernels.run ? std::make_shared<const FakeKernels>(std::move(kernels)) : nullptr;
  prepared_.clear();
}

Status FakeKernelTable::checkSet() const {
  if (kernels_) return {};
  return {ErrorCode::kUnsupported, "these devices have no kernels. A test gives them some"};
}

Status FakeKernelTable::checkPrepared(const KernelLaunch& launch, int device) const {
  MOONCAKE_TRY(checkSet());
  if (prepared_.contains(device)) return {};
  return refused(launch, "is not loaded on device " + std::to_string(device) +
                             ". Call prepareKernels() ahead of the first launch");
}

Status FakeKernelTable::prepare(int device) {
  Lock lock(mutex_);
  MOONCAKE_TRY(checkSet());
  prepared_.insert(device);
  return {};
}

Result<KernelRoom> FakeKernelTable::roomFor(const KernelLaunch& launch, int device) {
  Lock lock(mutex_);
  MOONCAKE_TRY(checkPrepared(launch, device));
  return kernels_->room;
}

Result<std::function<Status()>> FakeKernelTable::bind(DeviceStream stream,
                                                      const KernelLaunch& launch) {
  Lock lock(mutex_);
  MOONCAKE_TRY(checkPrepared(launch, stream.device));
  if (launch.grid == 0 || launch.block == 0 || launch.block > kMostThreads) {
    return refused(launch, std::to_string(launch.grid) + " blocks of " +
                               std::to_string(launch.block) + " threads; a block has 1 to " +
                               std::to_string(kMostThreads));
  }
  const auto most = static_cast<uint32_t>(kernels_->room.blocks());
  if (launch.isCooperative && launch.grid > most) {
    return refused(launch, std::to_string(launch.grid) + " blocks are to run at once, and " +
                               std::to_string(most) + " do");
  }
  std::vector<std::byte> arguments(launch.arguments.begin(), launch.arguments.end());
  return std::function<Status()>(
      [kernels = kernels_, stream, launch, arguments = std::move(arguments)] {
        KernelLaunch own = launch;
        own.arguments = arguments;
        return kernels->run(stream, own);
      });
}

}  // namespace mooncake
