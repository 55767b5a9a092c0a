#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>

namespace mooncake {

// Large blocks of memory that are made again and again, such as the results of a call. A block that
// was given back serves again: the kernel need not clear and map its pages anew, which costs as much
// as writing them. Thread-safe.
class BlockCache : public std::enable_shared_from_this<BlockCache> {
 public:
  // `mostIdle`: bytes that the cache keeps at most. Beyond them it frees those that were given back
  // first.
  static std::shared_ptr<BlockCache> make(size_t mostIdle) {
    return std::shared_ptr<BlockCache>(new BlockCache(mostIdle));
  }
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // At least this many bytes, with undefined contents. They come back with their last reference,
  // which may outlive all others of the cache. Null: there is no memory.
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
  void giveBack(Block block);
  // Removes idle blocks beyond the limit, those given back first. With the mutex held.
  std::list<Block> takeSurplus();
  static Block map(size_t bytes);
  static void unmap(const Block& block);

  mutable std::mutex mutex_;  // guards all below
  size_t mostIdle_;
  std::list<Block> idle_;  // given back last: at the back
  size_t idleBytes_ = 0;
};

}  // namespace mooncake
