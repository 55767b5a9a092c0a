#pragma once

#include <torch/version.h>

// torch's interface of symmetric memory changes often. This is its form in torch 2.11 to 2.15.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11)
#define MOONCAKE_HAS_SYMMETRIC_MEMORY
#endif
