#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <span>

#include "base/result.h"
#include "device/cuda/gdr_library.h"

namespace mooncake {

// Maps memory of CUDA devices for the host, by GDRCopy. Thread-safe.
class GdrCopy {
 public:
  // Errors of `library` are those of map().
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
  Status open();
  Result<Mapping> mapPages(unsigned long first, size_t bytes);

  const Result<GdrLibrary> library_;
  std::mutex mutex_;
  void* opened_ = nullptr;
  std::map<std::byte*, Mapping> mappings_;  // by the addresses of map()
};

}  // namespace mooncake
