#pragma once

#include <cstddef>
#include <map>
#include <span>

#include "base/mutex.h"
#include "base/result.h"
#include "device/cuda/gdr_library.h"

namespace mooncake {

// Maps memory of CUDA devices for the host, by GDRCopy. Thread-safe.
class GdrCopy {
 public:
  // map() returns the error of `library`.
  explicit GdrCopy(Result<GdrLibrary> library) : library_(std::move(library)) {}
  ~GdrCopy();
  GdrCopy(const GdrCopy&) = delete;
  GdrCopy& operator=(const GdrCopy&) = delete;

  // Returns the address at which the host writes the memory. kUnsupported: the machine has no
  // GDRCopy, or its driver does not take the memory.
  Result<std::span<std::byte>> map(std::span<std::byte> memory);
  // Takes an address of map() back, before the memory goes.
  void unmap(std::span<std::byte> mapped);

 private:
  struct Mapping {
    GdrLibrary::Handle handle;
    void* start;
    size_t bytes;
  };
  Status open() REQUIRES(mutex_);
  Result<Mapping> mapPages(unsigned long first, size_t bytes) REQUIRES(mutex_);

  const Result<GdrLibrary> library_;
  Mutex mutex_;
  void* opened_ GUARDED_BY(mutex_) = nullptr;
  std::map<std::byte*, Mapping> mappings_ GUARDED_BY(mutex_);  // by the addresses of map()
};

}  // namespace mooncake
