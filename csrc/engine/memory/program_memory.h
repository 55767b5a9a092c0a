#pragma once

#include <cstddef>

// Memory that belongs to the program: the program may unmap it at any time. The core touches such
// memory through system calls, which report a fault as EFAULT, or after a look at the mapping. A
// program that unmaps memory at the moment of such a copy can still crash itself.
namespace mooncake {

// Whether the process has a mapping at every byte of the range. One system call of about 0.25 us,
// for a range of any size. Says nothing about the protection.
bool isMapped(const void* address, size_t bytes);

// Copies memory of which either side may be the program's. Returns false, after a copy of a part or
// of nothing, when a side is not mapped.
bool copyIfMapped(void* to, const void* from, size_t bytes);

// The protection of a range, as its first and its last page show it.
struct Protection {
  bool isReadable = false;
  bool isWritable = false;  // true where the kernel cannot tell (before Linux 5.14)
};
// Populates these two pages. Nothing is readable where a part of the range is not mapped.
Protection protectionOf(const void* address, size_t bytes);

}  // namespace mooncake
