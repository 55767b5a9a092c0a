#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"

namespace mooncake {

// The functions of NVIDIA's GDRCopy (libgdrapi.so.2) that this library calls, with the names, types
// and meanings of its gdrapi.h. They are found at run time. Tests fill a table with functions of
// their own.
struct GdrLibrary {
  struct Handle {
    unsigned long h;
  };
  // The pages that were pinned.
  struct Info {
    uint64_t va;
    uint64_t mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    uint32_t flags;
    int mapping_type;
    char later[64];  // room for fields of later versions
  };
  void* (*gdr_open)() = nullptr;
  int (*gdr_close)(void* library) = nullptr;
  int (*gdr_pin_buffer)(void* library, unsigned long address, size_t bytes, uint64_t p2pToken,
                        uint32_t vaSpace, Handle* handle) = nullptr;
  int (*gdr_unpin_buffer)(void* library, Handle handle) = nullptr;
  int (*gdr_get_info_v2)(void* library, Handle handle, Info* info) = nullptr;
  int (*gdr_map)(void* library, Handle handle, void** address, size_t bytes) = nullptr;
  int (*gdr_unmap)(void* library, Handle handle, void* address, size_t bytes) = nullptr;

  // kUnsupported if it is not there or lacks a function. It stays loaded.
  static Result<GdrLibrary> load(const char* library = "libgdrapi.so.2");
};

}  // namespace mooncake
