#include "engine/memory/program_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace mooncake {
namespace {

// Number of bytes that one call copies: a few hundred microseconds.
constexpr size_t kBytesPerCall = size_t(1) << 20;

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

// Copies within kBytesPerCall. The kernel copies, so a page that must not be touched is an error of
// the call, and not a signal. Returns the number of bytes copied; 0: no byte can be.
size_t copySome(std::byte* to, const std::byte* from, size_t bytes) {
  const iovec target{to, bytes}, source{const_cast<std::byte*>(from), bytes};
  const ssize_t copied = ::process_vm_readv(::getpid(), &target, 1, &source, 1, 0);
  if (copied >= 0) return static_cast<size_t>(copied);
  // Some containers forbid the call. Then only a hole in the mapping is seen.
  if (errno == EFAULT || !isMapped(to, bytes) || !isMapped(from, bytes)) return 0;
  std::memmove(to, from, bytes);
  return bytes;
}

bool copyApart(std::byte* to, const std::byte* from, size_t bytes) {
  while (bytes > 0) {
    const size_t copied = copySome(to, from, std::min(bytes, kBytesPerCall));
    if (copied == 0) return false;
    to += copied;
    from += copied;
    bytes -= copied;
  }
  return true;
}

// The ranges overlap. The side of the source that the target lies on is copied first.
bool copyOverlapping(std::byte* to, const std::byte* from, size_t bytes) {
  std::vector<std::byte> held(std::min(bytes, kBytesPerCall));
  for (size_t done = 0; done < bytes;) {
    const size_t piece = std::min(held.size(), bytes - done);
    const size_t at = to < from ? done : bytes - done - piece;
    if (!copyApart(held.data(), from + at, piece) || !copyApart(to + at, held.data(), piece))
      return false;
    done += piece;
  }
  return true;
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
  auto* const target = static_cast<std::byte*>(to);
  auto* const source = static_cast<const std::byte*>(from);
  const bool areApart =
      std::less_equal<>()(target + bytes, source) || std::less_equal<>()(source + bytes, target);
  return areApart ? copyApart(target, source, bytes) : copyOverlapping(target, source, bytes);
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
