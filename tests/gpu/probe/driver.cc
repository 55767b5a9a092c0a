#include "driver.h"

#include <cstdio>
#include <dlfcn.h>

namespace probe {

Driver driver;

const char* loadDriver() {
  static char why[256];
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return ::dlerror();
#define PROBE_TEXT(name) #name
#define PROBE_NAME(name) PROBE_TEXT(name)
#define PROBE_FIND(function)                                                           \
  driver.function =                                                                    \
      reinterpret_cast<decltype(&::function)>(::dlsym(library, PROBE_NAME(function))); \
  if (driver.function == nullptr) {                                                    \
    std::snprintf(why, sizeof(why), "libcuda.so.1 has no %s", PROBE_NAME(function));   \
    return why;                                                                        \
  }
  PROBE_FUNCTIONS(PROBE_FIND)
  return nullptr;
}

}  // namespace probe
