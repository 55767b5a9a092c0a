#pragma once

#include <cstddef>
#include <string>

namespace mooncake {

// The last-level cache.
struct CpuCache {
  size_t bytes = size_t(32) << 20;
  size_t cores = 0;  // cores that share the cache; 0: the kernel does not say
};

// Reads the kernel's description in `folder`; values that it lacks keep their defaults. sysconf()
// does not serve: in a virtual machine with 2 cores it reported 320 MiB for a cache of 32 MiB.
CpuCache lastCache(const std::string& folder = "/sys/devices/system/cpu/cpu0/cache");

}  // namespace mooncake
