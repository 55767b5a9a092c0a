#pragma once

#include <cstddef>
#include <list>
#include <memory>

#include "base/mutex.h"

namespace mooncake {

// Large blocks of memory that are made again and again, such as the results of a call. A block that
// was given back serves again: the kernel need not clear and map its pages anew, which costs as much
// as writing them. Thread-safe.
class BlockCache : public std::enable_shared_from_this<BlockCache> {
 public:
  // `mostIdle`: bytes that the cache keeps at most. Beyond them it frees the blocks that were given
  // back first.
  static std::shared_ptr<BlockCache> make(size_t mostIdle) {
    return std::shared_ptr<BlockCache>(new BlockCache(mostIdle));
  }
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // At least this many bytes, with undefined contents. They come back with their last reference,
  // which may outlive all other references to the cache. Null: there is no memory.
  std::shared_ptr<std::byte> take(size_t bytes);
  size_t idleBytes() const;
  // Frees the idle blocks. From now on a block that comes back is freed at once.
  void close();

 private:
  struct Block {
    std::byte* data;
    size_t bytes;
  };
  explicit BlockCache(size_t mostIdle) : mostIdle_(mostIdle) {}
  void giveBack(Block block) EXCLUDES(mutex_);
  // Removes idle blocks beyond the limit, the longest idle first.
  std::list<Block> takeSurplus() REQUIRES(mutex_);
  static Block map(size_t bytes);
  static void unmap(const Block& block);

  mutable Mutex mutex_;
  size_t mostIdle_ GUARDED_BY(mutex_);
  std::list<Block> idle_ GUARDED_BY(mutex_);  // given back last: at the back
  size_t idleBytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake
