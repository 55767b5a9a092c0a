#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/memory/arena.h"

namespace mooncake {

// In our arena, one word for each peer that maps it. A peer looks at its word before it touches our
// memory, as it does with RegionMirror, and counts in it the writes that it is in the middle of: so
// we know when none of them is under way any more.
class FenceWords : public std::enable_shared_from_this<FenceWords> {
 public:
  static constexpr size_t kMost = 4096;
  static constexpr uint32_t kFenced = 1;  // the job goes on without the peer
  static constexpr uint32_t kClosed = 2;  // we have hung up
  static constexpr uint32_t kWrite = 4;   // each write of the peer's that is under way

  static Result<std::shared_ptr<FenceWords>> create(Arena& arena);

  // May outlive the arena, and then does nothing.
  class Word {
   public:
    Word(std::weak_ptr<FenceWords> all, uint32_t index, uint64_t offset)
        : all_(std::move(all)), index_(index), offset_(offset) {}
    Word(const Word&) = delete;
    Word& operator=(const Word&) = delete;
    // One that the peer may still look at is never used again.
    ~Word();
    uint64_t offset() const { return offset_; }  // in the arena
    void fence() { add(kFenced); }
    void close() { add(kClosed); }
    // The peer's process has ended: the word may be used again.
    void reset();
    // A write that has begun may be under way, and no other one begins.
    bool hasLateWrites() const;

   private:
    void add(uint32_t flag);

    const std::weak_ptr<FenceWords> all_;
    const uint32_t index_;
    const uint64_t offset_;
  };
  // kExhausted when all are in use.
  Result<std::shared_ptr<Word>> take();

 private:
  explicit FenceWords(ArenaBlock block) : block_(std::move(block)) {}
  std::atomic<uint32_t>& at(uint32_t index) const {
    return reinterpret_cast<std::atomic<uint32_t>*>(block_.data())[index];
  }

  const ArenaBlock block_;
  std::mutex mutex_;  // guards all below
  uint32_t used_ = 0;
  std::vector<uint32_t> free_;
};

}  // namespace mooncake
