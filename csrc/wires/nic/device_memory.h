#pragma once

#include <cstddef>

namespace mooncake {

// The place of memory, as the GPU's driver reports it.
struct NicMemoryPlace {
  bool isCuda = false;
  int device = 0;
};

class MemoryPlaces {
 public:
  virtual ~MemoryPlaces() = default;
  // Returns whether this process uses a GPU at all.
  virtual bool hasDevice() const = 0;
  virtual NicMemoryPlace of(const std::byte* memory) const = 0;

  // Asks the driver if it is in this process, and never loads it.
  static const MemoryPlaces& real();
};

}  // namespace mooncake
