#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "base/wait.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// A stamp is a word that only grows: what it says is for those to know who write it.
inline bool canStamp(const std::atomic<uint64_t>& word, uint64_t stamp) {
  return word.load(std::memory_order_acquire) < stamp;
}
// True when this call wrote the word. Sequentially consistent, so a doorbell that is rung
// afterwards is not missed (see Doorbell).
inline bool tryStamp(std::atomic<uint64_t>& word, uint64_t stamp) {
  uint64_t current = word.load(std::memory_order_relaxed);
  while (current < stamp) {
    if (word.compare_exchange_weak(current, stamp, std::memory_order_seq_cst)) return true;
  }
  return false;
}

// The stamp that announces a put. It is tried after the data has landed; where canStamp() is
// already false (the put is late) neither data nor stamp is written.
// `offset` is relative to the region and a multiple of 8. The doorbell at the start of the region
// is rung afterwards.
struct Signal {
  uint64_t offset = 0;
  uint64_t stamp = 0;
};

// A word of the peer's window part. Without a key there is none.
struct RemoteSignal {
  RemoteRegion region;
  Signal signal;
};

// Bytes from here into memory that the peer registered with kRemoteWrite, announced by a word of
// its window part. `data` may be reused as soon as put() returns.
struct PutRequest {
  RemoteRegion region;  // of the data
  uint64_t offset = 0;
  std::span<const std::byte> data;
  Signal signal;
  RemoteRegion signalRegion = {};  // of the word; no key: it is in `region`, too

  const RemoteRegion& regionOfSignal() const {
    return signalRegion.key != 0 ? signalRegion : region;
  }
};

// Counts gets and writes that are under way; rings when the last one ended. Must outlive them (see
// Channel::cancel); the bell must outlive the channel, because it may still be looked at when the
// last one has ended. get() and write() begin it.
struct Completion {
  explicit Completion(Doorbell* bell) : bell(bell) {}
  std::atomic<uint32_t> pending{0};
  std::atomic<ErrorCode> error{ErrorCode::kOk};  // of the first that failed
  Doorbell* bell;

  void begin() { pending.fetch_add(1, std::memory_order_relaxed); }
  void end(ErrorCode code) {
    if (code != ErrorCode::kOk) {
      auto none = ErrorCode::kOk;
      error.compare_exchange_strong(none, code);
    }
    Doorbell* toRing = bell;  // *this may be gone as soon as pending is 0
    if (pending.fetch_sub(1, std::memory_order_seq_cst) == 1) toRing->ring();
  }
  bool finished() const { return pending.load(std::memory_order_acquire) == 0; }
};

// Bytes of a peer's registered memory into memory here. `target` and `completion` belong to the
// transfer until completion->end() was called for it.
struct GetRequest {
  RemoteRegion region;
  uint64_t offset = 0;
  std::span<std::byte> target;
  Completion* completion = nullptr;
  bool isOfProgram = false;  // `target` may be unmapped: the get then ends with kInvalidArgument
};

// Bytes from here into memory that the peer registered with kRemoteWrite. `source` and `completion`
// belong to the transfer until completion->end() was called for it, and with kOk only when the
// bytes are in the peer's memory. After any other end the range may hold some of them.
struct WriteRequest {
  RemoteRegion region;
  uint64_t offset = 0;
  std::span<const std::byte> source;
  Completion* completion = nullptr;
  bool isOfProgram = false;  // as of a get
};

}  // namespace mooncake
