#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bytes.h"

namespace mooncake {

// What an engine wants its host to be able to read when it has ended. Lies in shared memory, of
// zeros at first, and outlives its process. Who dies while it writes leaves what stood there
// before.
class CrashReport {
 public:
  static constexpr size_t kMostBytes = 16376;

  // One thread at a time. False, and nothing is written, when there are too many bytes.
  bool write(ByteView text) {
    if (text.size() > kMostBytes) return false;
    const uint32_t turn = turn_.load(std::memory_order_relaxed) + 1;
    Page& page = pages_[turn % 2];
    page.bytes = text.size();
    if (!text.empty()) std::memcpy(page.text, text.data(), text.size());
    turn_.store(turn, std::memory_order_release);
    return true;
  }
  // After the end of its owner, who may have left anything here. Empty: nothing was ever written.
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
  std::atomic<uint32_t> turn_{0};  // pages_[turn_ % 2] counts
  Page pages_[2];                  // not touched here: pages of the system that nobody needs
};

}  // namespace mooncake
