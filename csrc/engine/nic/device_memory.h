#pragma once

#include <cstddef>

namespace mooncake {

// Where memory lies, as the driver of the GPU says.
struct MemoryPlace {
  bool isCuda = false;
  int device = 0;
};

class MemoryPlaces {
 public:
  virtual ~MemoryPlaces() = default;
  // Whether this process uses a GPU at all.
  virtual bool hasDevice() const = 0;
  virtual MemoryPlace of(const std::byte* memory) const = 0;

  // Of the driver that is in this process, if one is: it is never loaded for this.
  static const MemoryPlaces& real();
};

}  // namespace mooncake
