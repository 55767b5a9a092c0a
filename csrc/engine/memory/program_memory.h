#pragma once

#include <cstddef>

// Memory that belongs to the program, which may unmap or protect it at any time. The core touches
// such memory through system calls, which report a fault as EFAULT.
namespace mooncake {

// Returns whether the process has a mapping at every byte of the range. One system call of about
// 0.25 us, for a range of any size. It does not check the protection.
bool isMapped(const void* address, size_t bytes);

// Copies memory; either side may be the program's, and the ranges may overlap. Returns false if a
// side is not mapped, or must not be touched; the target may then hold a part of the copy.
bool copyIfMapped(void* to, const void* from, size_t bytes);

// Protection of a range, judged by its first and its last page.
struct Protection {
  bool isReadable = false;
  bool isWritable = false;  // true if the kernel cannot tell (before Linux 5.14)
};
// Populates these two pages. If a part of the range is not mapped, nothing is readable.
Protection protectionOf(const void* address, size_t bytes);

}  // namespace mooncake
