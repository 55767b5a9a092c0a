#pragma once

#include <cstdint>

namespace mooncake::kernels {

// The argument of kernel `probe`.
struct ProbeArguments {
  uint32_t* out = nullptr;  // memory that the device reaches
  uint32_t count = 0;       // of words in it; threads beyond write nothing
  uint32_t value = 0;
};

}  // namespace mooncake::kernels
