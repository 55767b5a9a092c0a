#include "wires/shm/cross_memory.h"

#include <cstring>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "base/fd.h"

namespace mooncake {
namespace {

CrossMemoryProof proofOf(const Nonce& nonce) {
  return {.address = reinterpret_cast<uintptr_t>(&nonce), .nonce = nonce};
}

uint64_t addressOf(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

// In most tests this process itself plays the peer: for the system call that makes no difference.
class CrossMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    auto opened = CrossMemory::open(::getpid(), proofOf(nonce_));
    if (!opened.ok()) GTEST_SKIP() << opened.error().message;
    memory_ = std::move(*opened);
  }
  Nonce nonce_ = Crypto::randomNonce();
  std::unique_ptr<CrossMemory> memory_;
};

TEST_F(CrossMemoryTest, Reads) {
  std::vector<char> source(3'000'001, 'x');
  source.front() = 'a';
  source.back() = 'z';
  std::vector<char> target(source.size());
  EXPECT_EQ(memory_->readAt(addressOf(source.data()), std::as_writable_bytes(std::span(target))),
            ErrorCode::kOk);
  EXPECT_EQ(source, target);
}

TEST_F(CrossMemoryTest, ChecksTheRegion) {
  uint64_t source = 7, target = 0;
  const auto bytes = std::as_writable_bytes(std::span(&target, 1));
  const RemoteRegion region{.address = addressOf(&source), .bytes = 8, .key = 1};
  EXPECT_EQ(memory_->read(region, 0, bytes), ErrorCode::kOk);
  EXPECT_EQ(target, 7u);
  EXPECT_EQ(memory_->read({.address = UINT64_MAX, .bytes = 8, .key = 1}, 0, bytes),
            ErrorCode::kRefused);
}

TEST_F(CrossMemoryTest, SaysWhatIsNotThere) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* pages =
      ::mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(::munmap(static_cast<char*>(pages) + 2 * page, page), 0);
  std::vector<std::byte> target(4 * page);
  const std::span<std::byte> all(target);
  EXPECT_EQ(memory_->readAt(addressOf(pages), all.first(2 * page)), ErrorCode::kOk);
  EXPECT_EQ(memory_->readAt(addressOf(pages), all), ErrorCode::kRefused) << "cut short";
  EXPECT_EQ(memory_->readAt(addressOf(pages) + 2 * page, all.first(1)), ErrorCode::kRefused);
  EXPECT_EQ(memory_->readAt(0, all.first(1)), ErrorCode::kRefused);
  // For a get, the error means "ask the peer": only its owner can read the memory of a device, for
  // example.
  EXPECT_EQ(memory_->read({.address = addressOf(pages) + 2 * page, .bytes = 1, .key = 1}, 0,
                          all.first(1)),
            ErrorCode::kUnsupported);
  ::munmap(pages, 2 * page);
  ::munmap(static_cast<char*>(pages) + 3 * page, page);
}

TEST_F(CrossMemoryTest, RefusesAProcessThatIsNotThePeer) {
  Nonce other = Crypto::randomNonce();
  CrossMemoryProof proof = proofOf(other);
  proof.nonce = nonce_;
  EXPECT_FALSE(CrossMemory::open(::getpid(), proof).ok());
  proof.address = 0;
  EXPECT_FALSE(CrossMemory::open(::getpid(), proof).ok());
  EXPECT_FALSE(CrossMemory::open(0, proofOf(nonce_)).ok());
  EXPECT_FALSE(CrossMemory::open(-1, proofOf(nonce_)).ok());
  // Another process has got the peer's number while we were connected.
  auto late = CrossMemory::open(::getpid(), proofOf(other));
  ASSERT_TRUE(late.ok());
  other = nonce_;
  uint64_t source = 7, target = 0;
  EXPECT_EQ((*late)->readAt(addressOf(&source), std::as_writable_bytes(std::span(&target, 1))),
            ErrorCode::kPeerLost);
}

TEST_F(CrossMemoryTest, SeesThatTheProcessIsGone) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char nothing;
    ::close(ends[1]);
    ::_exit(static_cast<int>(::read(ends[0], &nothing, 1)));  // until the parent closes its end
  }
  const Fd reading(ends[0]);  // made after the fork: forked children lose descriptors of an Fd
  Fd writing(ends[1]);
  auto opened =
      CrossMemory::open(child, proofOf(nonce_));  // a fork has the nonce at the same place
  ASSERT_TRUE(opened.ok()) << opened.error().message;
  uint64_t source = 7, target = 0;
  const auto bytes = std::as_writable_bytes(std::span(&target, 1));
  EXPECT_EQ((*opened)->readAt(addressOf(&source), bytes), ErrorCode::kOk);
  writing.reset();
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ((*opened)->readAt(addressOf(&source), bytes), ErrorCode::kPeerLost);
}

// Marked slow: 3 GiB go through the kernel (the source costs one page, the target as well: see
// below).
TEST_F(CrossMemoryTest, SlowReadsMoreThanOneCallMoves) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer takes 16 GiB to follow these bytes";
#endif
  constexpr size_t kBytes = (size_t(3) << 30) + 5;
  // Reads of untouched private memory give the zero page, so the source needs no memory; the target
  // is the same 2 MiB of a memfd mapped over and over.
  void* source = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(source, MAP_FAILED);
  constexpr size_t kTile = size_t(2) << 20;
  const Fd tile(::memfd_create("tile", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(tile.get(), kTile), 0);
  const size_t room = (kBytes + kTile - 1) / kTile * kTile;
  auto* target = static_cast<std::byte*>(
      ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  ASSERT_NE(target, MAP_FAILED);
  for (size_t at = 0; at < room; at += kTile) {
    ASSERT_NE(
        ::mmap(target + at, kTile, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, tile.get(), 0),
        MAP_FAILED);
  }
  static_cast<char*>(source)[kBytes - 1] = 'z';
  EXPECT_EQ(memory_->readAt(addressOf(source), {target, kBytes}), ErrorCode::kOk);
  EXPECT_EQ(target[kBytes - 1], std::byte('z'));
  ::munmap(source, kBytes);
  ::munmap(target, room);
}

}  // namespace
}  // namespace mooncake
