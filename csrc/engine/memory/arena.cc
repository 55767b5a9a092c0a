#include "engine/memory/arena.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/log.h"

namespace mooncake {
namespace {

// The size can never change again, and these seals cannot be removed.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// Linux 6.3. If vm.memfd_noexec demands it, a memfd without it is refused.
constexpr unsigned kNoExecSeal = 8;

size_t pageBytes() {
  static const size_t bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t roundUp(size_t bytes) { return (bytes + pageBytes() - 1) / pageBytes() * pageBytes(); }

Result<Fd> createMemfd() {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = ::memfd_create("mooncake-arena", flags | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create("mooncake-arena", flags);
  if (fd < 0) return systemError("memfd_create", errno);
  return Fd(fd);
}

// Forked children do not get the mapping, because they must not write into a window by accident.
// Core dumps leave it out.
Result<std::byte*> mapShared(int fd, size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    Error error = systemError("mmap of an arena of " + std::to_string(bytes) + " bytes", errno);
    error.message +=
        " (raise the limit of address space, ulimit -v, or set MOONCAKE_ARENA_BYTES on all ranks)";
    return error;
  }
  for (const int advice : {MADV_DONTFORK, MADV_DONTDUMP}) {
    if (::madvise(base, bytes, advice) == 0) continue;
    const Error error = systemError("madvise", errno);
    ::munmap(base, bytes);
    return error;
  }
  return static_cast<std::byte*>(base);
}

}  // namespace

Result<std::unique_ptr<Arena>> Arena::create(size_t capacity) {
  if (capacity == 0 || capacity > size_t(1) << 46) {
    return Error{ErrorCode::kInvalidArgument, "an arena of " + std::to_string(capacity) +
                                                  " bytes does not fit an address space"};
  }
  capacity = roundUp(capacity);
  auto fd = createMemfd();
  if (!fd.ok()) return fd.error();
  if (::ftruncate(fd->get(), static_cast<off_t>(capacity)) != 0) {
    return systemError("ftruncate of an arena to " + std::to_string(capacity) + " bytes", errno);
  }
  if (::fcntl(fd->get(), F_ADD_SEALS, kSeals) != 0) return systemError("fcntl(F_ADD_SEALS)", errno);
  auto base = mapShared(fd->get(), capacity);
  if (!base.ok()) return base.error();
  std::unique_ptr<Arena> arena(new Arena);
  arena->fd_ = std::move(*fd);
  arena->base_ = *base;
  arena->capacity_ = capacity;
  const Lock lock(arena->mutex_);
  arena->free_[0] = capacity;
  return arena;
}

Arena::~Arena() { ::munmap(base_, capacity_); }

Result<ArenaBlock> Arena::allocate(size_t bytes) {
  Lock lock(mutex_);
  const size_t wanted = bytes <= capacity_ ? roundUp(std::max<size_t>(bytes, 1)) : bytes;
  const auto fits = [&](const auto& range) { return range.second >= wanted; };
  const auto found = std::find_if(free_.begin(), free_.end(), fits);
  if (found == free_.end()) {
    uint64_t unused = 0;
    for (const auto& range : free_) unused += range.second;
    return Error{ErrorCode::kExhausted, "no room for " + std::to_string(bytes) +
                                            " bytes in an arena of " + std::to_string(capacity_) +
                                            " bytes, " + std::to_string(capacity_ - unused) +
                                            " in use. Destroy groups, buffers and shared tensors "
                                            "that the program does not use any more"};
  }
  const auto [offset, length] = *found;
  free_.erase(found);
  if (length > wanted) free_[offset + wanted] = length - wanted;
  ArenaBlock block;
  block.arena_ = this;
  block.offset_ = offset;
  block.bytes_ = wanted;
  return block;
}

void Arena::release(uint64_t offset, size_t bytes) {
  if (keepsContents_) return;
  // Done before these pages can be allocated again. The hole gives the memory back, and reads as
  // zeros.
  if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes)) != 0) {
    log(LogLevel::kWarning, "arena", systemError("fallocate(PUNCH_HOLE)", errno).message,
        ": memory is kept until the engine ends");
    std::memset(base_ + offset, 0, bytes);
  }
  Lock lock(mutex_);
  const auto after = free_.lower_bound(offset);
  if (after != free_.end() && offset + bytes == after->first) {
    bytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

ArenaBlock::ArenaBlock(ArenaBlock&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      offset_(std::exchange(other.offset_, 0)),
      bytes_(std::exchange(other.bytes_, 0)) {}

ArenaBlock& ArenaBlock::operator=(ArenaBlock&& other) noexcept {
  if (this == &other) return *this;
  if (arena_) arena_->release(offset_, bytes_);
  arena_ = std::exchange(other.arena_, nullptr);
  offset_ = std::exchange(other.offset_, 0);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

ArenaBlock::~ArenaBlock() {
  if (arena_) arena_->release(offset_, bytes_);
}

std::byte* ArenaBlock::data() const { return arena_->base() + offset_; }

Result<std::unique_ptr<ArenaMapping>> ArenaMapping::map(Fd memfd, size_t capacity) {
  struct stat info {};
  if (::fstat(memfd.get(), &info) != 0) return systemError("fstat of a peer's arena", errno);
  // Only memfds and similar files have seals: all other files fail here.
  const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
  if (capacity == 0 || seals < 0 || (seals & kSeals) != kSeals || info.st_size < 0 ||
      static_cast<uint64_t>(info.st_size) != capacity) {
    return Error{ErrorCode::kProtocol,
                 "a peer's arena is not a sealed memfd of " + std::to_string(capacity) + " bytes"};
  }
  auto base = mapShared(memfd.get(), capacity);
  if (!base.ok()) return base.error();
  return std::unique_ptr<ArenaMapping>(new ArenaMapping(*base, capacity));
}

ArenaMapping::~ArenaMapping() {
  if (mark_) mark_->fetch_or(markBits_, std::memory_order_seq_cst);
  ::munmap(base_, capacity_);
}

}  // namespace mooncake
