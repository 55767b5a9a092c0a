#include "device/accelerators.h"

#include <memory>
#include <string>

#include "base/mutex.h"
#include "device/cuda/open_cuda.h"
#include "device/host_accelerator.h"
#ifdef MOONCAKE_WITH_SIM
#include "device/fake/fake_devices.h"
#endif

namespace mooncake {
namespace {

Accelerator* host() {
  static Accelerator* const opened = new HostAccelerator;
  return opened;
}

Result<Accelerator*> cuda() {
  static Mutex mutex;
  static Accelerator* opened GUARDED_BY(mutex) = nullptr;
  Lock lock(mutex);
  if (opened != nullptr) return opened;
  auto made = openCuda();
  if (!made.ok()) return made.error();
  opened = made->release();
  return opened;
}

}  // namespace

Result<Accelerator*> openAccelerator(std::string_view name) {
  if (name == "host") return host();
  if (name == "cuda") return cuda();
#ifdef MOONCAKE_WITH_SIM
  if (name == "fake") return static_cast<Accelerator*>(&fakeDevices());
#else
  if (name == "fake") {
    return Error{ErrorCode::kUnsupported,
                 "this build has no fake devices. Build with -DMOONCAKE_WITH_SIM=ON"};
  }
#endif
  return Error{ErrorCode::kInvalidArgument, "there is no accelerator \"" + std::string(name) +
                                                "\"; the names are host, cuda and fake"};
}

}  // namespace mooncake
