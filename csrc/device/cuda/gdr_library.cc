#include "device/cuda/gdr_library.h"

#include <dlfcn.h>
#include <string>
#include <type_traits>

namespace mooncake {

Result<GdrLibrary> GdrLibrary::load(const char* library) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Error{ErrorCode::kUnsupported, "there is no GDRCopy: " + std::string(::dlerror()) +
                                              ". NVIDIA's package gdrcopy brings it"};
  }
  GdrLibrary found;
  std::string missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
    if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  find("gdr_open", found.gdr_open);
  find("gdr_close", found.gdr_close);
  find("gdr_pin_buffer", found.gdr_pin_buffer);
  find("gdr_unpin_buffer", found.gdr_unpin_buffer);
  find("gdr_get_info_v2", found.gdr_get_info_v2);
  find("gdr_map", found.gdr_map);
  find("gdr_unmap", found.gdr_unmap);
  if (missing.empty()) return found;
  return Error{ErrorCode::kUnsupported,
               std::string(library) + " lacks " + missing + ". GDRCopy 2.2 or later has it"};
}

}  // namespace mooncake
