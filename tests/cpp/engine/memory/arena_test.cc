#include "engine/memory/arena.h"

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <gtest/gtest.h>
#include <random>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace mooncake {
namespace {

constexpr size_t kMiB = size_t(1) << 20;

size_t page() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

std::unique_ptr<Arena> makeArena(size_t capacity) {
  auto arena = Arena::create(capacity);
  EXPECT_TRUE(arena.ok()) << arena.error().message;
  return std::move(*arena);
}

ArenaBlock allocateOrDie(Arena& arena, size_t bytes) {
  auto block = arena.allocate(bytes);
  EXPECT_TRUE(block.ok());
  return std::move(*block);
}

size_t bytesHeld(const Arena& arena) {
  struct stat info {};
  EXPECT_EQ(::fstat(arena.fd(), &info), 0);
  return static_cast<size_t>(info.st_blocks) * 512;
}

bool isZero(const ArenaBlock& block) {
  return std::all_of(block.data(), block.data() + block.bytes(),
                     [](std::byte b) { return b == std::byte(0); });
}

TEST(Arena, CostsNothingUntilTouched) {
  const auto arena = makeArena(size_t(4) << 30);
  const ArenaBlock block = allocateOrDie(*arena, 64 * kMiB);
  EXPECT_EQ(bytesHeld(*arena), 0u);
  std::memset(block.data(), 1, 2 * kMiB);
  EXPECT_GE(bytesHeld(*arena), 2 * kMiB);
  EXPECT_LT(bytesHeld(*arena), 8 * kMiB);
}

TEST(Arena, BlocksArePagesAndDoNotOverlap) {
  const auto arena = makeArena(kMiB);
  const ArenaBlock a = allocateOrDie(*arena, 1);
  const ArenaBlock b = allocateOrDie(*arena, page() + 1);
  EXPECT_EQ(a.bytes(), page());
  EXPECT_EQ(b.bytes(), 2 * page());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data()) % page(), 0u);
  EXPECT_GE(b.offset(), a.offset() + a.bytes());
  EXPECT_EQ(b.data(), arena->base() + b.offset());
}

TEST(Arena, GivesMemoryBackAndHandsItOutZeroed) {
  const auto arena = makeArena(16 * kMiB);
  uint64_t offset;
  {
    const ArenaBlock block = allocateOrDie(*arena, 8 * kMiB);
    std::memset(block.data(), 0xff, block.bytes());
    offset = block.offset();
    EXPECT_GE(bytesHeld(*arena), 8 * kMiB);
  }
  EXPECT_EQ(bytesHeld(*arena), 0u);
  const ArenaBlock again = allocateOrDie(*arena, 8 * kMiB);
  EXPECT_EQ(again.offset(), offset);
  EXPECT_TRUE(isZero(again));
}

TEST(Arena, SaysWhenItIsFull) {
  const auto arena = makeArena(4 * page());
  const ArenaBlock block = allocateOrDie(*arena, 3 * page());
  for (const size_t bytes : {2 * page(), SIZE_MAX, SIZE_MAX - 1}) {
    const auto refused = arena->allocate(bytes);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, ErrorCode::kExhausted);
    EXPECT_NE(refused.error().message.find(std::to_string(3 * page()) + " in use"),
              std::string::npos);
  }
  EXPECT_TRUE(arena->allocate(page()).ok());
}

TEST(Arena, NeighboursMergeInAnyOrder) {
  const auto arena = makeArena(64 * page());
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    std::vector<ArenaBlock> blocks;
    while (true) {
      auto block = arena->allocate((1 + random() % 7) * page());
      if (!block.ok()) break;
      std::memset(block->data(), 1, block->bytes());
      blocks.push_back(std::move(*block));
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    blocks.clear();
    EXPECT_TRUE(arena->allocate(64 * page()).ok()) << "fragments were not merged";
  }
}

TEST(Arena, NobodyCanShrinkIt) {
  const auto arena = makeArena(kMiB);
  EXPECT_NE(::ftruncate(arena->fd(), 0), 0);
  EXPECT_NE(::ftruncate(arena->fd(), 2 * kMiB), 0);
  EXPECT_EQ(::fcntl(arena->fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(Arena, AForkedChildDoesNotHaveIt) {
  const auto arena = makeArena(kMiB);
  const ArenaBlock block = allocateOrDie(*arena, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    // mincore() fails with ENOMEM where nothing is mapped; only async-signal-safe calls here.
    unsigned char resident;
    ::_exit(::mincore(block.data(), 1, &resident) != 0 && errno == ENOMEM ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(ArenaMapping, SeesTheSameBytesAndOutlivesTheArena) {
  auto arena = makeArena(kMiB);
  ArenaBlock block = allocateOrDie(*arena, 100);
  auto mapping = ArenaMapping::map(Fd(::dup(arena->fd())), arena->capacity());
  ASSERT_TRUE(mapping.ok()) << mapping.error().message;
  std::byte* there = (*mapping)->base() + block.offset();
  block.data()[5] = std::byte(42);
  EXPECT_EQ(there[5], std::byte(42));
  there[6] = std::byte(43);
  EXPECT_EQ(block.data()[6], std::byte(43));
  // The owner dies without giving anything back.
  Fd kept(::dup(arena->fd()));
  auto second = ArenaMapping::map(std::move(kept), arena->capacity());
  ASSERT_TRUE(second.ok());
  block = ArenaBlock();
  there[7] = std::byte(44);
  arena.reset();
  EXPECT_EQ((*second)->base()[7], std::byte(44));
}

TEST(ArenaMapping, RefusesWhatIsNotASealedMemfdOfThatSize) {
  const auto arena = makeArena(kMiB);
  const auto refused = [](Fd fd, size_t bytes) {
    const auto mapping = ArenaMapping::map(std::move(fd), bytes);
    return !mapping.ok() && mapping.error().code == ErrorCode::kProtocol;
  };
  EXPECT_TRUE(refused(Fd(::dup(arena->fd())), 2 * kMiB));
  EXPECT_TRUE(refused(Fd(::dup(arena->fd())), kMiB / 2));
  EXPECT_TRUE(refused(Fd(::dup(arena->fd())), 0));
  EXPECT_TRUE(refused(Fd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), kMiB));

  Fd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), kMiB), 0);
  EXPECT_TRUE(refused(Fd(::dup(unsealed.get())), kMiB));
  ASSERT_EQ(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  EXPECT_TRUE(refused(std::move(unsealed), kMiB));
}

}  // namespace
}  // namespace mooncake
