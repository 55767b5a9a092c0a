#pragma once

#include <cstdint>

// What fork() does to us: the child has our memory and descriptors, but none of our threads, so
// nothing of ours can work there. It must not keep our sockets open either: a peer would not see
// their end when we die while the child lives (a DataLoader's worker, say).
namespace mooncake {

// Grows in every forked child: what was made under another generation belongs to an ancestor.
uint32_t forkGeneration();

// Descriptors between these two calls are closed in forked children. Any thread.
void closeOnFork(int fd);
void keepOnFork(int fd);

}  // namespace mooncake
