#pragma once

#include <string>

#include "base/mutex.h"
#include "wires/nic/nic.h"
#include "wires/stream/ring.h"

namespace mooncake {

// A card that completes at once and moves no bytes: the remaining time is our own cost.
class NullNic final : public Nic {
 public:
  explicit NullNic(size_t depth = 256);

  const std::string& name() const override { return name_; }
  const char* provider() const override { return "null"; }
  const NicLimits& limits() const override { return limits_; }
  Bytes address() const override { return Bytes(1); }
  Result<NicPeer> insert(ByteView) override { return NicPeer(1); }
  void remove(NicPeer) override {}
  Result<std::unique_ptr<NicMemory>> registerMemory(std::span<std::byte> memory,
                                                    uint32_t access) override;
  Status send(NicPeer peer, NicBuffer header, NicBuffer body, void* context) override;
  Status receive(NicBuffer buffer, void* context) override;
  Status read(NicPeer peer, NicBuffer target, NicKey from, uint64_t offset, void* context) override;
  Status write(NicPeer peer, NicBuffer source, NicKey to, uint64_t offset, void* context) override;
  size_t poll(std::span<NicCompletion> into) override;
  void wait(Deadline deadline) override;
  void wake() override;
  void close() override {}

 private:
  Status complete(NicCompletion::Kind kind, void* context) EXCLUDES(mutex_);

  const std::string name_ = "null0";
  const NicLimits limits_;
  Mutex mutex_;
  Condition changed_;
  Ring<NicCompletion> done_ GUARDED_BY(mutex_);
  bool isWoken_ GUARDED_BY(mutex_) = false;
  bool isAsleep_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
