#include "device/cuda/gdr_copy.h"

#include <cstdint>
#include <string>
#include <utility>

namespace mooncake {
namespace {

constexpr unsigned long kPageBytes = 1UL << 16;  // of memory that the driver pins

Error failed(const char* function, int code) {
  return {ErrorCode::kUnsupported, std::string("GDRCopy: ") + function + "() returned " +
                                       std::to_string(code) +
                                       ": GDRCOPY_ENABLE_LOGGING=1 has it print the cause"};
}

}  // namespace

GdrCopy::~GdrCopy() {
  while (!mappings_.empty()) unmap({mappings_.begin()->first, 1});
  if (opened_ != nullptr) library_->gdr_close(opened_);
}

Status GdrCopy::open() {
  if (!library_.ok()) return library_.error();
  if (opened_ == nullptr) opened_ = library_->gdr_open();
  if (opened_ != nullptr) return {};
  return {ErrorCode::kUnsupported,
          "GDRCopy: gdr_open() failed: load its kernel module gdrdrv, and let this user open "
          "/dev/gdrdrv"};
}

// Pins and maps whole pages.
Result<GdrCopy::Mapping> GdrCopy::mapPages(unsigned long first, size_t bytes) {
  Mapping made{.handle = {}, .start = nullptr, .bytes = bytes};
  if (const int code = library_->gdr_pin_buffer(opened_, first, bytes, 0, 0, &made.handle))
    return failed("gdr_pin_buffer", code);
  GdrLibrary::Info info{};
  const char* function = "gdr_get_info_v2";
  int code = library_->gdr_get_info_v2(opened_, made.handle, &info);
  const bool isOther = code == 0 && info.va != first;
  if (code == 0 && !isOther) {
    function = "gdr_map";
    code = library_->gdr_map(opened_, made.handle, &made.start, bytes);
  }
  if (code == 0 && !isOther) return made;
  library_->gdr_unpin_buffer(opened_, made.handle);
  if (isOther)
    return Error{ErrorCode::kUnsupported, "GDRCopy has pinned other pages than those asked for"};
  return failed(function, code);
}

Result<std::span<std::byte>> GdrCopy::map(std::span<std::byte> memory) {
  Lock lock(mutex_);
  MOONCAKE_TRY(open());
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  const unsigned long first = begin / kPageBytes * kPageBytes;
  const unsigned long end = (begin + memory.size() + kPageBytes - 1) / kPageBytes * kPageBytes;
  const auto made = mapPages(first, end - first);
  if (!made.ok()) return made.error();
  auto* const mapped = static_cast<std::byte*>(made->start) + (begin - first);
  mappings_.emplace(mapped, *made);
  return std::span(mapped, memory.size());
}

void GdrCopy::unmap(std::span<std::byte> mapped) {
  Lock lock(mutex_);
  const auto found = mappings_.find(mapped.data());
  if (found == mappings_.end()) return;
  const Mapping mapping = found->second;
  mappings_.erase(found);
  library_->gdr_unmap(opened_, mapping.handle, mapping.start, mapping.bytes);
  library_->gdr_unpin_buffer(opened_, mapping.handle);
}

}  // namespace mooncake
