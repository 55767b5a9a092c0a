#include "device/fake/fake_memory.h"

#include <cerrno>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/bytes.h"

namespace mooncake {
namespace {

size_t pages(size_t bytes) {
  static const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

uintptr_t numberOf(const void* address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace

// Unmaps its range, and gives the pages in the memfd back if this process allocated them.
class FakeMemory::Mapping {
 public:
  // `fd` < 0: memory of this process alone. `owner` is null if the pages are another process's.
  static Result<std::shared_ptr<Mapping>> make(int fd, uint64_t offset, size_t bytes,
                                               std::shared_ptr<Fd> owner) {
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* const start = ::mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, flags, fd,
                               static_cast<off_t>(offset));
    if (start == MAP_FAILED) {
      return Error{errno == ENOMEM ? ErrorCode::kExhausted : ErrorCode::kSystem,
                   systemError("mmap of " + std::to_string(bytes) + " bytes", errno).message};
    }
    return std::shared_ptr<Mapping>(new Mapping(start, bytes, offset, std::move(owner)));
  }
  ~Mapping() {
    ::munmap(start_, pages(bytes_));
    if (owner_) {
      ::fallocate(owner_->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(offset_), static_cast<off_t>(pages(bytes_)));
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* start() const { return start_; }

 private:
  Mapping(void* start, size_t bytes, uint64_t offset, std::shared_ptr<Fd> owner)
      : start_(start), bytes_(bytes), offset_(offset), owner_(std::move(owner)) {}

  void* const start_;
  const size_t bytes_;
  const uint64_t offset_;
  const std::shared_ptr<Fd> owner_;
};

void* FakeMemory::add(Block block) {
  void* const start = block.mapping->start();
  blocks_[numberOf(start)] = std::move(block);
  return start;
}

FakeMemory::Blocks::iterator FakeMemory::find(const void* address) {
  auto after = blocks_.upper_bound(numberOf(address));
  if (after == blocks_.begin()) return blocks_.end();
  --after;
  return numberOf(address) - after->first < after->second.bytes ? after : blocks_.end();
}

Status FakeMemory::checkLimit(size_t bytes) const {
  if (bytes == 0) return {ErrorCode::kInvalidArgument, "an allocation of 0 bytes"};
  if (bytes <= limit_ && allocated_ <= limit_ - bytes) return {};
  return {ErrorCode::kExhausted,
          "no " + std::to_string(bytes) + " bytes of device memory are left: " +
              std::to_string(allocated_) + " of " + std::to_string(limit_) + " are in use"};
}

Result<std::span<std::byte>> FakeMemory::allocate(int device, size_t bytes) {
  Lock lock(mutex_);
  MOONCAKE_TRY(checkLimit(bytes));
  DeviceFile& file = files_[static_cast<size_t>(device)];
  if (!file.fd) {
    const int fd = ::memfd_create("fake device", MFD_CLOEXEC);
    if (fd < 0) return systemError("memfd_create", errno);
    file.fd = std::make_shared<Fd>(fd);
  }
  const uint64_t offset = file.bytes;
  const uint64_t end = offset + pages(bytes);
  if (::ftruncate(file.fd->get(), static_cast<off_t>(end)) != 0)
    return systemError("ftruncate(memfd)", errno);
  auto mapping = Mapping::make(file.fd->get(), offset, bytes, file.fd);
  if (!mapping.ok()) return mapping.error();
  file.bytes = end;
  allocated_ += bytes;
  void* const start = add({.mapping = std::move(*mapping),
                           .origin = Origin::kAllocated,
                           .device = device,
                           .bytes = bytes,
                           .charged = bytes,
                           .fileOffset = offset});
  return std::span(static_cast<std::byte*>(start), bytes);
}

Result<std::span<std::byte>> FakeMemory::allocatePinned(size_t bytes) {
  if (bytes == 0) return Error{ErrorCode::kInvalidArgument, "an allocation of 0 bytes"};
  auto mapping = Mapping::make(-1, 0, bytes, nullptr);
  if (!mapping.ok()) return mapping.error();
  Lock lock(mutex_);
  void* const start =
      add({.mapping = std::move(*mapping), .origin = Origin::kPinned, .bytes = bytes});
  return std::span(static_cast<std::byte*>(start), bytes);
}

void FakeMemory::limit(size_t bytes) {
  Lock lock(mutex_);
  limit_ = bytes;
}

MemoryPlace FakeMemory::placeOf(const void* address) {
  Lock lock(mutex_);
  const auto found = find(address);
  if (found == blocks_.end()) return {};
  const Block& block = found->second;
  if (block.origin == Origin::kPinned) return {.kind = MemoryKind::kPinned};
  return {.kind = MemoryKind::kDevice, .device = block.device};
}

Status FakeMemory::checkRange(const void* address, size_t bytes) {
  Lock lock(mutex_);
  const auto found = find(address);
  if (found == blocks_.end()) return {};
  const size_t left = found->second.bytes - (numberOf(address) - found->first);
  if (bytes <= left) return {};
  return {ErrorCode::kInvalidArgument, std::to_string(bytes) + " bytes where the allocation has " +
                                           std::to_string(left) + " up to its end"};
}

Result<ExportedMemory> FakeMemory::exportMemory(const void* address) {
  Lock lock(mutex_);
  const auto found = find(address);
  if (found == blocks_.end() || found->second.origin != Origin::kAllocated) {
    return Error{ErrorCode::kUnsupported,
                 "only memory that this process allocated on a device can be exported"};
  }
  const Block& block = found->second;
  const int fd = files_[static_cast<size_t>(block.device)].fd->get();
  struct stat file {};
  if (::fstat(fd, &file) != 0) return systemError("fstat(memfd)", errno);
  const Bytes handle = ByteWriter()
                           .put(static_cast<uint32_t>(::getpid()))
                           .put(static_cast<uint32_t>(fd))
                           .put(static_cast<uint64_t>(file.st_ino))
                           .put(block.fileOffset)
                           .take();
  const uint64_t offset = numberOf(address) - found->first;
  return ExportedMemory{
      .handle = std::string(reinterpret_cast<const char*>(handle.data()), handle.size()),
      .allocation = block.fileOffset,
      .offset = offset,
      .bytes = block.bytes - offset};
}

Result<void*> FakeMemory::importMemory(const ExportedMemory& memory, int device) {
  ByteReader in(std::as_bytes(std::span(memory.handle)));
  const auto process = in.get<uint32_t>();
  const auto number = in.get<uint32_t>();
  const auto inode = in.get<uint64_t>();
  const auto fileOffset = in.get<uint64_t>();
  MOONCAKE_TRY(in.finish("a handle of fake memory"));
  if (static_cast<pid_t>(process) == ::getpid()) {
    return Error{ErrorCode::kInvalidArgument,
                 "the memory is of this process, which uses its own address"};
  }
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) return systemError("open(" + path + ")", errno);
  struct stat file {};
  if (::fstat(fd.get(), &file) != 0) return systemError("fstat(" + path + ")", errno);
  const uint64_t bytes = memory.offset + memory.bytes;
  if (file.st_ino != inode || static_cast<uint64_t>(file.st_size) < fileOffset + bytes) {
    return Error{ErrorCode::kInvalidArgument,
                 "the process that exported the memory is gone: " + path + " is another file"};
  }
  auto mapping = Mapping::make(fd.get(), fileOffset, bytes, nullptr);
  if (!mapping.ok()) return mapping.error();
  Lock lock(mutex_);
  void* const start = add({.mapping = std::move(*mapping),
                           .origin = Origin::kImported,
                           .device = device,
                           .bytes = bytes,
                           .offset = memory.offset});
  return static_cast<void*>(static_cast<std::byte*>(start) + memory.offset);
}

Result<PeerMemory::Allocation> FakeMemory::allocateShared(int device, size_t asked) {
  const size_t bytes = pages(asked);
  Lock lock(mutex_);
  MOONCAKE_TRY(checkLimit(bytes));
  Fd file(::memfd_create("fake peer memory", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return systemError("memfd_create", errno);
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
    return systemError("ftruncate(memfd)", errno);
  // A process that maps it would die if it shrank.
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return systemError("fcntl(F_ADD_SEALS)", errno);
  auto mapping = Mapping::make(file.get(), 0, bytes, nullptr);
  if (!mapping.ok()) return mapping.error();
  allocated_ += bytes;
  void* const start = add({.mapping = std::move(*mapping),
                           .origin = Origin::kShared,
                           .device = device,
                           .bytes = bytes,
                           .charged = bytes});
  return PeerMemory::Allocation{.memory = std::span(static_cast<std::byte*>(start), bytes),
                                .descriptor = std::move(file)};
}

Result<std::span<std::byte>> FakeMemory::mapShared(const Fd& descriptor, size_t bytes, int device) {
  struct stat file {};
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (::fstat(descriptor.get(), &file) != 0) return systemError("fstat of peer memory", errno);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || static_cast<size_t>(file.st_size) != bytes) {
    return Error{ErrorCode::kInvalidArgument,
                 "the descriptor is none of " + std::to_string(bytes) + " bytes of peer memory"};
  }
  auto mapping = Mapping::make(descriptor.get(), 0, bytes, nullptr);
  if (!mapping.ok()) return mapping.error();
  Lock lock(mutex_);
  void* const start = add({.mapping = std::move(*mapping),
                           .origin = Origin::kShared,
                           .device = device,
                           .bytes = bytes});
  return std::span(static_cast<std::byte*>(start), bytes);
}

std::shared_ptr<void> FakeMemory::release(const void* address, Origin origin) {
  Lock lock(mutex_);
  const auto found = find(address);
  if (found == blocks_.end() || found->second.origin != origin ||
      found->first + found->second.offset != numberOf(address)) {
    return nullptr;
  }
  allocated_ -= found->second.charged;
  std::shared_ptr<void> mapping = std::move(found->second.mapping);
  blocks_.erase(found);
  return mapping;
}

}  // namespace mooncake
