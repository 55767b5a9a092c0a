#pragma once

#include <cstddef>

namespace mooncake {

// Asks for huge pages where the memory is large. Fresh memory is otherwise mapped 4 KiB at a time,
// which costs as much again as writing it. Changes nothing where the kernel has none to give.
void adviseHugePages(void* memory, size_t bytes);

}  // namespace mooncake
