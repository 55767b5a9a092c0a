#include "engine/memory/program_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace mooncake {
namespace {

// Number of bytes copied after one check of the mapping: a few hundred microseconds.
constexpr size_t kBytesPerLook = size_t(1) << 20;

uintptr_t pageBytes() {
  static const auto bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

uintptr_t pageOf(uintptr_t address) { return address / pageBytes() * pageBytes(); }

int populate(uintptr_t page) {
  const bool isDone =
      ::madvise(reinterpret_cast<void*>(page), pageBytes(), MADV_POPULATE_WRITE) == 0;
  return isDone ? 0 : errno;
}

// EINVAL means a mapping without the right, EFAULT a file that ends before the page. Any other
// error, such as a lack of memory, says nothing about the protection.
bool mayBeWritten(uintptr_t page) {
  const int error = populate(page);
  return error != EINVAL && error != EFAULT;
}

bool kernelPopulates() {
  static const bool answer = [] {
    void* page =
        ::mmap(nullptr, pageBytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return false;
    const bool isDone = populate(reinterpret_cast<uintptr_t>(page)) == 0;
    ::munmap(page, pageBytes());
    return isDone;
  }();
  return answer;
}

}  // namespace

// MS_ASYNC only walks the mappings, and ENOMEM means a hole among them.
bool isMapped(const void* address, size_t bytes) {
  if (bytes == 0) return true;
  const auto start = reinterpret_cast<uintptr_t>(address), page = pageOf(start);
  return ::msync(reinterpret_cast<void*>(page), start + bytes - page, MS_ASYNC) == 0 ||
         errno != ENOMEM;
}

bool copyIfMapped(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  auto* source = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    const size_t piece = std::min(bytes, kBytesPerLook);
    if (!isMapped(target, piece) || !isMapped(source, piece)) return false;
    std::memmove(target, source, piece);
    target += piece;
    source += piece;
    bytes -= piece;
  }
  return true;
}

Protection protectionOf(const void* address, size_t bytes) {
  if (bytes == 0) return {true, true};
  if (!isMapped(address, bytes)) return {};
  const auto first = reinterpret_cast<uintptr_t>(address), last = first + bytes - 1;
  std::byte values[2];
  const iovec to{values, sizeof values};
  const iovec from[2] = {{reinterpret_cast<void*>(first), 1}, {reinterpret_cast<void*>(last), 1}};
  const ssize_t got = ::process_vm_readv(::getpid(), &to, 1, from, 2, 0);
  // Some containers forbid the call; then the range counts as readable.
  const bool isReadable = got == 2 || (got < 0 && errno != EFAULT);
  const bool isWritable =
      !kernelPopulates() || (mayBeWritten(pageOf(first)) && mayBeWritten(pageOf(last)));
  return {isReadable, isReadable && isWritable};
}

}  // namespace mooncake
