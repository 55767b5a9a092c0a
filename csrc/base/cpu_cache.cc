#include "base/cpu_cache.h"

#include <fstream>

namespace mooncake {

size_t lastCacheBytes(const std::string& folder) {
  constexpr size_t kUsual = size_t(32) << 20;
  int last = 0;
  size_t found = 0;
  for (int index = 0;; ++index) {
    const std::string one = folder + "/index" + std::to_string(index);
    std::ifstream levelFile(one + "/level"), sizeFile(one + "/size");
    int level = 0;
    size_t size = 0;
    char unit = 0;
    if (!(levelFile >> level)) break;
    if (!(sizeFile >> size >> unit) || unit != 'K' || level <= last) continue;
    last = level;
    found = size << 10;
  }
  return found > 0 ? found : kUsual;
}

}  // namespace mooncake
