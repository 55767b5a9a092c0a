#include "base/cpu_cache.h"

#include <fstream>

namespace mooncake {
namespace {

// Counts the cores in a list such as "0-7,64-71". Returns 0 if the text is no such list.
size_t coresIn(std::istream& list) {
  size_t count = 0, first = 0;
  while (list >> first) {
    size_t last = first;
    if (list.peek() == '-' && !(list.ignore() >> last)) return 0;
    if (last < first) return 0;
    count += last - first + 1;
    if (list.peek() != ',') return count;
    list.ignore();
  }
  return 0;
}

}  // namespace

CpuCache lastCache(const std::string& folder) {
  CpuCache found;
  int last = 0;
  for (int index = 0;; ++index) {
    const std::string one = folder + "/index" + std::to_string(index);
    std::ifstream levelFile(one + "/level"), sizeFile(one + "/size"),
        coresFile(one + "/shared_cpu_list");
    int level = 0;
    size_t size = 0;
    char unit = 0;
    if (!(levelFile >> level)) break;
    if (!(sizeFile >> size >> unit) || unit != 'K' || size == 0 || level <= last) continue;
    last = level;
    found = {.bytes = size << 10, .cores = coresIn(coresFile)};
  }
  return found;
}

}  // namespace mooncake
