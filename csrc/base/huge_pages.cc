#include "base/huge_pages.h"

#include <cstdint>
#include <sys/mman.h>

namespace mooncake {

void adviseHugePages(void* memory, size_t bytes) {
  constexpr size_t kHugePage = size_t(2) << 20, kPage = 4096;
  if (bytes < 2 * kHugePage) return;
  const auto begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace mooncake
