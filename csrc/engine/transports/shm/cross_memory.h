#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <sys/types.h>

#include "base/crypto.h"
#include "engine/local/direct_reader.h"

namespace mooncake {

// What a process shows of itself, so that a reader can tell that it reads from the right one.
struct CrossMemoryProof {
  uint64_t address =
      0;  // where the nonce lies in the owner's memory, for as long as its engine lives
  Nonce nonce{};
};

// Reads the memory of another process of this host with process_vm_readv: one copy, made by the
// kernel on the calling thread. It only reads: a writer stopped before its call would write years
// later.
//
// Law 5: the kernel lets us read whatever that process has mapped, or nothing (it asks for the
// right to trace it). The channel asks the peer's RegionMirror before and after.
class CrossMemory final : public DirectReader {
 public:
  // Tries it. kUnsupported, with the reason, when it does not work with this process.
  static Result<std::unique_ptr<CrossMemory>> open(pid_t process, const CrossMemoryProof& proof);

  ErrorCode read(const RemoteRegion& region, uint64_t offset, std::span<std::byte> target) override;

  // kOk or nothing to rely on in `target`: kPeerLost (the process is gone, or its number is
  // another's by now), kRefused (no such memory there), kUnsupported (the kernel does not let us).
  ErrorCode readAt(uint64_t address, std::span<std::byte> target) const;

 private:
  CrossMemory(pid_t process, const CrossMemoryProof& proof) : process_(process), proof_(proof) {}

  pid_t process_;
  CrossMemoryProof proof_;
};

}  // namespace mooncake
