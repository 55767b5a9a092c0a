#include "proxy/command_ring.h"

#include <atomic>

#include "base/stores.h"

namespace mooncake::proxy {

void CommandRing::store(uint32_t& word, uint32_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
  if (areCountsMapped_) drainStores();
}

bool CommandRing::hasNext() const {
  auto& slot = slots_[taken_ & (slots_.size() - 1)];
  return std::atomic_ref(slot.valid).load(std::memory_order_acquire) == taken_ + 1;
}

bool CommandRing::take(kernels::ProxyCommand& command) {
  if (!hasNext()) return false;
  const auto& slot = slots_[taken_ & (slots_.size() - 1)];
  // Not the word `valid`: a wrong kernel may write it at any time.
  command.sourceRegion = slot.sourceRegion;
  command.targetRegion = slot.targetRegion;
  command.sourceOffset = slot.sourceOffset;
  command.targetOffset = slot.targetOffset;
  command.bytes = slot.bytes;
  command.signal = slot.signal;
  command.valid = ++taken_;
  return true;
}

void CommandRing::publishTaken() { store(counts_->taken, taken_); }

void CommandRing::complete(uint32_t count) { store(counts_->completed, completed_ += count); }

void CommandRing::end(kernels::ProxyEnd why) { store(counts_->ended, uint32_t(why)); }

}  // namespace mooncake::proxy
