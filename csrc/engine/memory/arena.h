#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"

namespace mooncake {

class Arena;

// Pages of an Arena. The destructor returns them, also to the system. Must not outlive the arena.
class ArenaBlock {
 public:
  ArenaBlock() = default;
  ArenaBlock(ArenaBlock&& other) noexcept;
  ArenaBlock& operator=(ArenaBlock&& other) noexcept;
  ~ArenaBlock();

  std::byte* data() const;
  uint64_t offset() const { return offset_; }  // in the arena: the same in every mapping
  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return arena_ != nullptr; }

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  uint64_t offset_ = 0;
  size_t bytes_ = 0;
};

// The memory of one engine that peers on the host map: one memfd, sparse, so a page costs nothing
// until it is touched. A memfd has no name: it is not in /dev/shm and needs no room there. The
// kernel frees it with its last user, also after SIGKILL. Forked children do not inherit it
// (MADV_DONTFORK, close-on-exec).
class Arena {
 public:
  static Result<std::unique_ptr<Arena>> create(size_t capacity);
  ~Arena();

  // Returns page-aligned, zeroed memory. kExhausted names the capacity and the amount in use.
  Result<ArenaBlock> allocate(size_t bytes);

  // From now on released blocks keep their contents for the peers that map them, until the last one
  // unmaps.
  void keepContents() { keepsContents_ = true; }

  int fd() const { return fd_.get(); }
  size_t capacity() const { return capacity_; }
  std::byte* base() const { return base_; }

 private:
  friend class ArenaBlock;
  Arena() = default;
  void release(uint64_t offset, size_t bytes) EXCLUDES(mutex_);

  Fd fd_;
  std::byte* base_ = nullptr;
  size_t capacity_ = 0;
  std::atomic<bool> keepsContents_{false};
  Mutex mutex_;
  std::map<uint64_t, uint64_t> free_ GUARDED_BY(mutex_);  // offset -> bytes, neighbours merged
};

// A peer's arena mapped here, shared, for reading and writing. Stays valid after the peer's death.
class ArenaMapping {
 public:
  // kProtocol unless it is a memfd of exactly this size, sealed against shrinking: if a mapping
  // lost its pages, this process would end with SIGBUS.
  static Result<std::unique_ptr<ArenaMapping>> map(Fd memfd, size_t capacity);
  ~ArenaMapping();
  std::byte* base() const { return base_; }
  size_t capacity() const { return capacity_; }
  // When the mapping ends, sets these bits of a word of the arena. Its owner then knows that no
  // thread of this process looks at the arena any more.
  void markAtEnd(uint64_t offset, uint32_t bits) {
    mark_ = reinterpret_cast<std::atomic<uint32_t>*>(base_ + offset);
    markBits_ = bits;
  }

 private:
  ArenaMapping(std::byte* base, size_t capacity) : base_(base), capacity_(capacity) {}
  std::byte* base_;
  size_t capacity_;
  std::atomic<uint32_t>* mark_ = nullptr;
  uint32_t markBits_ = 0;
};

}  // namespace mooncake
