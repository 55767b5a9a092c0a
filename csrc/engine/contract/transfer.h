#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/result.h"
#include "base/wait.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// A stamp is a word that only grows. Its writers define its meaning.
inline bool canStamp(const std::atomic<uint64_t>& word, uint64_t stamp) {
  return word.load(std::memory_order_acquire) < stamp;
}
// Returns true if this call wrote the word. Sequentially consistent, so that a waiter sees a
// doorbell that is rung afterwards (see Doorbell).
inline bool tryStamp(std::atomic<uint64_t>& word, uint64_t stamp) {
  uint64_t current = word.load(std::memory_order_relaxed);
  while (current < stamp) {
    if (word.compare_exchange_weak(current, stamp, std::memory_order_seq_cst)) return true;
  }
  return false;
}

// The stamp that announces a put. It is written after the data has landed. If canStamp() is already
// false, the put is late, and neither data nor stamp is written. `offset` is relative to the region
// and a multiple of 8. Afterwards the region's bell is rung (RegionTable::add).
struct Signal {
  uint64_t offset = 0;
  uint64_t stamp = 0;
};

// A word of the peer's window part. Key 0: no word.
struct RemoteSignal {
  RemoteRegion region;
  Signal signal;
};

// A put of bytes from here into memory that the peer registered with kRemoteWrite. A word of the
// peer's window part announces it. `data` may be reused as soon as put() returns.
struct PutRequest {
  RemoteRegion region;  // the region of the data
  uint64_t offset = 0;
  std::span<const std::byte> data;
  Signal signal;
  RemoteRegion signalRegion = {};  // the region of the word; key 0: the word is in `region`, too

  const RemoteRegion& regionOfSignal() const {
    return signalRegion.key != 0 ? signalRegion : region;
  }
};

// Counts gets and writes under way; rings the bell when the last one ends. Must outlive them (see
// Channel::cancel). The bell must outlive the channel, because it may still be used just after the
// last one has ended. get() and write() call begin().
struct Completion {
  explicit Completion(Doorbell* bell) : bell(bell) {}
  std::atomic<uint32_t> pending{0};
  std::atomic<ErrorCode> error{ErrorCode::kOk};  // of the first transfer that failed
  std::string why;                               // its cause, if the wire knows more than the code
  Doorbell* bell;

  void begin() { pending.fetch_add(1, std::memory_order_relaxed); }
  void end(ErrorCode code) {
    if (code != ErrorCode::kOk) {
      auto none = ErrorCode::kOk;
      error.compare_exchange_strong(none, code);
    }
    leave();
  }
  void end(const Error& failure) {
    auto none = ErrorCode::kOk;
    // Only the first failure writes the text, and before it counts as ended.
    if (error.compare_exchange_strong(none, failure.code)) why = failure.message;
    leave();
  }
  bool finished() const { return pending.load(std::memory_order_acquire) == 0; }
  // For the next transfer, once this one has finished.
  void reset() {
    error.store(ErrorCode::kOk, std::memory_order_relaxed);
    why.clear();
  }

 private:
  void leave() {
    Doorbell* toRing = bell;  // *this may be gone as soon as pending is 0
    if (pending.fetch_sub(1, std::memory_order_seq_cst) == 1) toRing->ring();
  }
};

// A get of bytes of a peer's registered memory into memory here. `target` and `completion` belong
// to the transfer until it calls completion->end().
struct GetRequest {
  RemoteRegion region;
  uint64_t offset = 0;
  std::span<std::byte> target;
  Completion* completion = nullptr;
  bool isOfProgram = false;  // `target` may be unmapped: the get then ends with kInvalidArgument
  MemoryOwner owner = {};    // the device that owns `target`
};

// A write of bytes from here into memory that the peer registered with kRemoteWrite. `source` and
// `completion` belong to the transfer until it calls completion->end(). After kOk the bytes are in
// the peer's memory. After any other end the range may hold some of them.
struct WriteRequest {
  RemoteRegion region;
  uint64_t offset = 0;
  std::span<const std::byte> source;
  Completion* completion = nullptr;
  bool isOfProgram = false;  // see GetRequest
  MemoryOwner owner = {};    // the device that owns `source`
};

}  // namespace mooncake
