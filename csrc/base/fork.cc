#include "base/fork.h"

#include <atomic>
#include <bit>
#include <cstddef>
#include <pthread.h>
#include <unistd.h>

namespace mooncake {
namespace {

// Global, because it mirrors the process's one table of descriptors. A child may take no lock that
// another thread held at the fork; bits of atomic words need none. Untouched pages cost no memory.
constexpr size_t kMostDescriptors = size_t(1) << 20;
std::atomic<uint64_t> closed[kMostDescriptors / 64];
std::atomic<uint32_t> generation{0};

void afterForkInChild() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (size_t word = 0; word < std::size(closed); ++word) {
    uint64_t bits = closed[word].load(std::memory_order_relaxed);
    if (bits == 0) continue;
    closed[word].store(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) ::close(int(word * 64) + std::countr_zero(bits));
  }
}

[[maybe_unused]] const int registered = ::pthread_atfork(nullptr, nullptr, afterForkInChild);

uint64_t bitOf(int fd) { return uint64_t(1) << (size_t(fd) % 64); }
bool isTracked(int fd) { return fd >= 0 && size_t(fd) < kMostDescriptors; }

}  // namespace

uint32_t forkGeneration() { return generation.load(std::memory_order_relaxed); }

void closeOnFork(int fd) {
  if (isTracked(fd)) closed[size_t(fd) / 64].fetch_or(bitOf(fd), std::memory_order_relaxed);
}

void keepOnFork(int fd) {
  if (isTracked(fd)) closed[size_t(fd) / 64].fetch_and(~bitOf(fd), std::memory_order_relaxed);
}

}  // namespace mooncake
