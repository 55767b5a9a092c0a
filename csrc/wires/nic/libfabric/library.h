#pragma once

#include <memory>
#include <rdma/fabric.h>
#include <string>

#include "base/result.h"

namespace mooncake {

// libfabric, opened at run time. Wheels also run on machines without it, and EFA's own copy lies
// where the linker does not look. A process must never hold two: the first one to start claims the
// device, and the other one then finds no card. So a copy that is already in the process is used.
class LibfabricLibrary {
 public:
  // If `path` is empty: the copy in the process, else /opt/amazon/efa, else the system's.
  // kUnsupported names the copies that were tried. Once opened, it stays open.
  static Result<std::shared_ptr<const LibfabricLibrary>> open(const std::string& path);

  const std::string& path() const { return path_; }  // of the file
  uint32_t version() const { return version_; }
  // The newest interface that both this build and the library know.
  uint32_t api() const;
  std::string describe() const;  // "libfabric 1.17 (interface 1.17), /usr/lib/..."

  // The functions that are real symbols; all other functions go through the objects.
  int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags,
                 const fi_info* hints, fi_info** info) = nullptr;
  void (*freeinfo)(fi_info* info) = nullptr;
  fi_info* (*dupinfo)(const fi_info* info) = nullptr;
  int (*fabric)(fi_fabric_attr* attr, fid_fabric** fabric, void* context) = nullptr;
  const char* (*strerror)(int errnum) = nullptr;

 private:
  LibfabricLibrary() = default;
  Status load(void* handle);

  std::string path_;
  uint32_t version_ = 0;
};

}  // namespace mooncake
