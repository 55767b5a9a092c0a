#include "wires/shm/cross_memory.h"

#include <algorithm>
#include <cerrno>
#include <sys/uio.h>

namespace mooncake {
namespace {

// The kernel moves at most 2 GiB less a page per call.
constexpr size_t kCallBytes = size_t(1) << 30;

ErrorCode codeOf(int errnoValue) {
  switch (errnoValue) {
    case ESRCH:
      return ErrorCode::kPeerLost;
    case EFAULT:
      return ErrorCode::kRefused;
    case ENOMEM:
      return ErrorCode::kExhausted;
    default:  // EPERM, ENOSYS, and any error of a container's filter
      return ErrorCode::kUnsupported;
  }
}

}  // namespace

Result<std::unique_ptr<CrossMemory>> CrossMemory::open(pid_t process,
                                                       const CrossMemoryProof& proof) {
  if (process <= 0) {
    return Error{ErrorCode::kUnsupported, "the peer's process is not visible in our pid namespace"};
  }
  std::unique_ptr<CrossMemory> memory(new CrossMemory(process, proof));
  const ErrorCode code = memory->readAt(proof.address, {});
  if (code != ErrorCode::kOk) {
    return Error{ErrorCode::kUnsupported, "process_vm_readv of process " + std::to_string(process) +
                                              " does not work: " + errorCodeName(code)};
  }
  return memory;
}

ErrorCode CrossMemory::read(const RemoteRegion& region, uint64_t offset,
                            std::span<std::byte> target) {
  if (region.address + region.bytes < region.address) return ErrorCode::kRefused;
  // Whatever the kernel's error was, the peer can still answer the get. If it cannot, it will be
  // seen as silent.
  return readAt(region.address + offset, target) == ErrorCode::kOk ? ErrorCode::kOk
                                                                   : ErrorCode::kUnsupported;
}

// Each call also fetches the nonce, behind the data. One call reads from one address space from
// beginning to end. So the right nonce proves that the data came from our peer, and not from a
// process that has got its number since.
ErrorCode CrossMemory::readAt(uint64_t address, std::span<std::byte> target) const {
  do {
    const auto piece = target.first(std::min(kCallBytes, target.size()));
    Nonce nonce{};
    const iovec to[2] = {{piece.data(), piece.size()}, {nonce.data(), nonce.size()}};
    const iovec from[2] = {
        {reinterpret_cast<void*>(static_cast<uintptr_t>(address)), piece.size()},
        {reinterpret_cast<void*>(static_cast<uintptr_t>(proof_.address)), nonce.size()}};
    const ssize_t got = ::process_vm_readv(process_, to, 2, from, 2, 0);
    if (got < 0) return codeOf(errno);
    // A short read: the call met a page that it could not read.
    if (static_cast<size_t>(got) < piece.size()) return ErrorCode::kRefused;
    if (nonce != proof_.nonce) return ErrorCode::kPeerLost;
    target = target.subspan(piece.size());
    address += piece.size();
  } while (!target.empty());
  return ErrorCode::kOk;
}

}  // namespace mooncake
