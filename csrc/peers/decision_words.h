#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/group_state.h"
#include "peers/peer_verdict.h"

namespace mooncake {

// Atomic accesses of the host to words that it shares with a device.
struct HostAccess {
  template <typename Word>
  static Word loadAcquire(Word& word) {
    return std::atomic_ref(word).load(std::memory_order_acquire);
  }
  static void storeRelaxed(uint32_t& word, uint32_t value) {
    std::atomic_ref(word).store(value, std::memory_order_relaxed);
  }
  static void storeRelease(uint32_t& word, uint32_t value) {
    std::atomic_ref(word).store(value, std::memory_order_release);
  }
};

// Writes the words by which a host stops a group's kernels and decides how they go on; see
// kernels::HostWords. The emulator's host (tests/simt) has an `Access` of its own. Not thread-safe.
template <typename Access = HostAccess>
class DecisionWords {
 public:
  explicit DecisionWords(kernels::HostWords& words) : words_(words) {}

  // Counts the stops.
  uint32_t generation() const { return generation_; }

  // Kernels stop, within an operation or between two.
  void stop() { Access::storeRelease(words_.stop, ++generation_); }
  bool haveStopped() const { return Access::loadAcquire(words_.stopped) == generation_; }

  // Kernels that have stopped go on like this.
  void decide(const PeerVerdict& verdict) {
    words_.active = verdict.active;
    words_.serial = verdict.serial;
    words_.partial = verdict.partial;
    words_.among = verdict.among;
    words_.skipped = verdict.skipped;
    tell(verdict.decision);
  }

  // Kernels that wait, and all later ones, end without a result. A kernel may still read the words of
  // the decision before, so they stay as they are: with some of them replaced, it would take old
  // signals for new ones.
  void refuse() {
    // A stop that has no decision yet gets this one.
    if (decided_ == generation_) ++generation_;
    tell(kernels::Decision::kRefuse);
    Access::storeRelease(words_.stop, generation_);
  }

 private:
  void tell(kernels::Decision decision) {
    Access::storeRelaxed(words_.decision, uint32_t(decision));
    Access::storeRelease(words_.decided, generation_);
    decided_ = generation_;
  }

  kernels::HostWords& words_;
  uint32_t generation_ = 0;
  uint32_t decided_ = 0;  // the last stop that has a decision
};

}  // namespace mooncake
