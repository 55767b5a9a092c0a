#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "engine/contract/transfer.h"
#include "engine/memory/arena.h"
#include "engine/peers/peer_process.h"

namespace mooncake {

// Words in our arena, one for each peer that maps it. A peer checks its word before it touches our
// memory, as it does with RegionMirror. It also counts its writes under way in the word, so we know
// when none is left. A word is reused for another peer when its peer has unmapped the arena, or the
// peer's process has ended.
class FenceWords : public std::enable_shared_from_this<FenceWords> {
 public:
  static constexpr size_t kMost = 4096;
  static constexpr uint32_t kFenced = 1;  // the job goes on without the peer
  static constexpr uint32_t kClosed = 2;  // we have closed the channel
  static constexpr uint32_t kWrite = 4;   // added once for each write of the peer that is under way
  // The peer has unmapped our memory: it touches neither the memory nor its word any more.
  static constexpr uint32_t kLeft = uint32_t(1) << 31;

  static Result<std::shared_ptr<FenceWords>> create(Arena& arena);

  // May outlive the arena, and then does nothing.
  class Word {
   public:
    Word(std::weak_ptr<FenceWords> all, uint32_t index, uint64_t offset, pid_t process)
        : all_(std::move(all)), index_(index), offset_(offset), process_(process) {}
    Word(const Word&) = delete;
    Word& operator=(const Word&) = delete;
    ~Word() { release(); }
    uint64_t offset() const { return offset_; }  // in the arena
    // Returns the offset for sending it to the peer. From now on the peer may write the word until
    // it has unmapped the arena or its process has ended. The word is reused for no other peer
    // before that.
    uint64_t offer() {
      isOffered_.store(true, std::memory_order_relaxed);
      return offset_;
    }
    void fence() { add(kFenced); }
    void close() { add(kClosed); }
    // Gives the word back. It is reused as soon as the peer cannot look at it any more. The other
    // calls do nothing afterwards.
    void release();
    // Returns whether a write may be under way, while no further one can begin.
    bool hasLateWrites() const;

   private:
    void add(uint32_t flag);

    const std::weak_ptr<FenceWords> all_;
    const uint32_t index_;
    const uint64_t offset_;
    const PeerProcess process_;
    std::atomic<bool> isOffered_{false};
    bool isReleased_ = false;  // guarded by FenceWords::mutex_
  };
  // Returns a word for a peer in this process (0: not visible from our pid namespace). kExhausted:
  // all words are in use.
  Result<std::shared_ptr<Word>> take(pid_t process) EXCLUDES(mutex_);

 private:
  // A word that was given back while its peer could still look at it.
  struct Waiting {
    uint32_t index;
    PeerProcess process;
    bool isOffered;
  };
  explicit FenceWords(ArenaBlock block) : block_(std::move(block)) {}
  std::atomic<uint32_t>& at(uint32_t index) const {
    return reinterpret_cast<std::atomic<uint32_t>*>(block_.data())[index];
  }
  bool tryFree(const Waiting& word) REQUIRES(mutex_);
  void reclaim() REQUIRES(mutex_);

  const ArenaBlock block_;
  Mutex mutex_;
  uint32_t used_ GUARDED_BY(mutex_) = 0;
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
