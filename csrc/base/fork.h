#pragma once

#include <cstdint>

// Effects of fork() on this library. The child has our memory and descriptors but none of our
// threads, so our objects do not work there. The child must not keep our sockets open either: if we
// die while it lives (a DataLoader's worker, say), a peer would not see them close.
namespace mooncake {

// Grows in every forked child. An object made under another generation belongs to an ancestor.
uint32_t forkGeneration();

// Forked children close descriptors that are between these two calls. Any thread.
void closeOnFork(int fd);
void keepOnFork(int fd);

}  // namespace mooncake
