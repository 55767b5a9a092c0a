#include "wires/nic/null/null_nic.h"

namespace mooncake {
namespace {

class NullMemory final : public NicMemory {
 public:
  explicit NullMemory(std::span<std::byte> memory) : memory_(memory) {}
  std::span<std::byte> memory() const override { return memory_; }
  NicKey key() const override { return {}; }

 private:
  const std::span<std::byte> memory_;
};

}  // namespace

NullNic::NullNic(size_t depth)
    : limits_{.mostSendBytes = size_t(1) << 20,
              .mostRmaBytes = uint64_t(1) << 30,
              .sendDepth = depth,
              .receiveDepth = depth,
              .remoteRead = true,
              .remoteWrite = true,
              .withdrawalStops = true} {}

Result<std::unique_ptr<NicMemory>> NullNic::registerMemory(std::span<std::byte> memory, uint32_t) {
  return std::unique_ptr<NicMemory>(new NullMemory(memory));
}

Status NullNic::complete(NicCompletion::Kind kind, void* context) {
  Lock lock(mutex_);
  if (done_.size() >= limits_.sendDepth) return {ErrorCode::kExhausted, "the card has no room"};
  done_.push({.kind = kind, .context = context});
  if (isAsleep_) changed_.notify_one();
  return {};
}

Status NullNic::send(NicPeer, NicBuffer, NicBuffer, void* context) {
  return complete(NicCompletion::Kind::kSent, context);
}
// No packet ever arrives.
Status NullNic::receive(NicBuffer, void*) { return {}; }
Status NullNic::read(NicPeer, NicBuffer, NicKey, uint64_t, void* context) {
  return complete(NicCompletion::Kind::kRead, context);
}
Status NullNic::write(NicPeer, NicBuffer, NicKey, uint64_t, void* context) {
  return complete(NicCompletion::Kind::kWritten, context);
}

size_t NullNic::poll(std::span<NicCompletion> into) {
  Lock lock(mutex_);
  size_t count = 0;
  for (; count < into.size() && !done_.empty(); ++count) {
    into[count] = done_.front();
    done_.pop();
  }
  return count;
}

void NullNic::wait(Deadline deadline) {
  Lock lock(mutex_);
  isAsleep_ = true;
  changed_.wait_until(mutex_, deadline.when(),
                      [this]() REQUIRES(mutex_) { return isWoken_ || !done_.empty(); });
  isAsleep_ = isWoken_ = false;
}

void NullNic::wake() {
  Lock lock(mutex_);
  isWoken_ = true;
  changed_.notify_one();
}

}  // namespace mooncake
