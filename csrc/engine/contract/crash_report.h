#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bytes.h"

namespace mooncake {

// A report that an engine leaves for its host to read after its end. Lies in shared memory that is
// zero at first, and outlives its process. If the process dies while it writes, the previous report
// stays.
class CrashReport {
 public:
  static constexpr size_t kMostBytes = 16376;

  // One thread at a time. Returns false, and writes nothing, if there are too many bytes.
  bool write(ByteView text) {
    if (text.size() > kMostBytes) return false;
    const uint32_t turn = turn_.load(std::memory_order_relaxed) + 1;
    Page& page = pages_[turn % 2];
    page.bytes = text.size();
    if (!text.empty()) std::memcpy(page.text, text.data(), text.size());
    turn_.store(turn, std::memory_order_release);
    return true;
  }
  // Call it after the owner's end. The content is not trusted. Empty: nothing was ever written.
  Bytes read() const {
    const Page& page = pages_[turn_.load(std::memory_order_acquire) % 2];
    const uint64_t bytes = page.bytes;
    if (bytes > kMostBytes) return {};
    return Bytes(page.text, page.text + bytes);
  }

 private:
  struct Page {
    uint64_t bytes;
    std::byte text[kMostBytes];
  };
  std::atomic<uint32_t> turn_{0};  // pages_[turn_ % 2] is the valid one
  Page pages_[2];                  // not initialized: untouched pages cost no memory
};

}  // namespace mooncake
