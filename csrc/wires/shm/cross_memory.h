#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <sys/types.h>

#include "base/crypto.h"
#include "wires/local/direct_reader.h"

namespace mooncake {

// Lets a reader check that it reads from the right process.
struct CrossMemoryProof {
  uint64_t address = 0;  // of the nonce in the owner's memory, while its engine lives
  Nonce nonce{};
};

// Reads the memory of another process of this host with process_vm_readv: one copy, made by the
// kernel on the calling thread. It never writes: a writer stopped before its call could write years
// later.
//
// Law 5: the kernel lets us read everything that the process has mapped, or nothing (it requires
// the right to trace it). So the channel checks the peer's RegionMirror before and after a read.
class CrossMemory final : public DirectReader {
 public:
  // Tries a read. kUnsupported, with the reason: it does not work with this process.
  static Result<std::unique_ptr<CrossMemory>> open(pid_t process, const CrossMemoryProof& proof);

  ErrorCode read(const RemoteRegion& region, uint64_t offset, std::span<std::byte> target) override;

  // After an error `target` holds nothing reliable. kPeerLost: the process is gone, or its number
  // belongs to another one. kRefused: no such memory there. kUnsupported: the kernel does not let
  // us read.
  ErrorCode readAt(uint64_t address, std::span<std::byte> target) const;

 private:
  CrossMemory(pid_t process, const CrossMemoryProof& proof) : process_(process), proof_(proof) {}

  pid_t process_;
  CrossMemoryProof proof_;
};

}  // namespace mooncake
