#include "wires/nic/libfabric/library.h"

#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <link.h>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/signal_handlers.h"
#include "base/signals.h"

namespace mooncake {
namespace {

constexpr uint32_t kBuiltFor = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
// In older versions EFA uses its device's RDMA only if told to.
constexpr uint32_t kDeviceRdmaApi = FI_VERSION(1, 18);

std::string text(uint32_t version) {
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

int collectLibfabric(dl_phdr_info* info, size_t, void* found) {
  const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  const std::string_view name = path.substr(path.rfind('/') + 1);
  // Wheels rename libraries that they bundle: libfabric-0a1b2c3d.so.1.
  if (name.starts_with("libfabric") && name.find(".so") != std::string_view::npos)
    static_cast<std::vector<std::string>*>(found)->emplace_back(path);
  return 0;
}

std::vector<std::string> copiesInProcess() {
  std::vector<std::string> paths;
  ::dl_iterate_phdr(collectLibfabric, &paths);
  return paths;
}

// Overrides defaults of the provider that harm us; settings of the user stay.
void setProviderKnobs() {
  // Within a host the provider copies with the processor, even GPU memory (libfabric#12328). There
  // our own transports are chosen first.
  ::setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0", 0);
  if (kBuiltFor < kDeviceRdmaApi) ::setenv("FI_EFA_USE_DEVICE_RDMA", "1", 0);
}

}  // namespace

Result<std::shared_ptr<const LibfabricLibrary>> LibfabricLibrary::open(const std::string& path) {
  static Mutex mutex;
  static std::shared_ptr<const LibfabricLibrary> opened GUARDED_BY(mutex);
  Lock lock(mutex);
  if (opened) {
    if (!path.empty() && path != opened->path_) {
      log(LogLevel::kWarning, "fabric", "MOONCAKE_LIBFABRIC=", path,
          " is not used: ", opened->path_, " is in the process, and there must be one only");
    }
    return opened;
  }
  Guard environment(environmentMutex());
  setProviderKnobs();
  std::vector<std::string> candidates = copiesInProcess();
  if (candidates.empty()) {
    if (!path.empty()) {
      candidates = {path};
    } else {
      candidates = {"/opt/amazon/efa/lib/libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1",
                    "libfabric.so.1"};
    }
  } else if (!path.empty() && candidates.front() != path) {
    log(LogLevel::kWarning, "fabric", "MOONCAKE_LIBFABRIC=", path,
        " is not used: ", candidates.front(), " is in the process, and there must be one only");
  }
  KeptSignalHandlers kept;
  BlockedSignals blocked;
  std::string tried;
  for (const std::string& candidate : candidates) {
    // Never closed: providers leave threads and exit handlers behind.
    void* handle = ::dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      tried += "\n  " + std::string(::dlerror());
      continue;
    }
    std::shared_ptr<LibfabricLibrary> library(new LibfabricLibrary);
    if (const Status loaded = library->load(handle); !loaded.ok()) {
      tried += "\n  " + candidate + ": " + loaded.error().message;
      continue;
    }
    opened = library;
    log(LogLevel::kInfo, "fabric", library->describe());
    return opened;
  }
  return Error{ErrorCode::kUnsupported,
               "libfabric cannot be opened (libfabric1 of Debian and Ubuntu, or the EFA installer, "
               "brings it; MOONCAKE_LIBFABRIC names it); tried:" +
                   tried};
}

Status LibfabricLibrary::load(void* handle) {
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
    return function != nullptr;
  };
  uint32_t (*version)() = nullptr;
  const bool hasAll = find("fi_getinfo", getinfo) && find("fi_freeinfo", freeinfo) &&
                      find("fi_dupinfo", dupinfo) && find("fi_fabric", fabric) &&
                      find("fi_strerror", strerror) && find("fi_version", version);
  if (!hasAll) return {ErrorCode::kUnsupported, "is no libfabric: a function is missing"};
  version_ = version();
  if (FI_MAJOR(version_) < FI_MAJOR(kBuiltFor))
    return {ErrorCode::kUnsupported, "version " + text(version_) + " is too old"};
  Dl_info where{};
  if (::dladdr(reinterpret_cast<void*>(getinfo), &where) != 0 && where.dli_fname != nullptr)
    path_ = where.dli_fname;
  return {};
}

uint32_t LibfabricLibrary::api() const { return std::min(version_, kBuiltFor); }

std::string LibfabricLibrary::describe() const {
  return "libfabric " + text(version_) + " (interface " + text(api()) + "), " + path_;
}

}  // namespace mooncake
