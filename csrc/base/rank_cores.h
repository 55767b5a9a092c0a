#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/deadline.h"

namespace mooncake {

// Knows on which cores the ranks of a group run. All ranks are on one host. Each writes its core
// into a word that all of them map.
//
// Ranks that poll for each other's stamps keep their cores busy. The kernel then finds no idle core
// when it wakes one of them, and sometimes puts two ranks on one core beside a free one. They stay
// there for a long time: each runs only while the other sleeps, so no load balancer sees too much
// load. A waiting rank therefore leaves a crowded core itself.
//
// Used by one thread at a time: the thread that runs the operation.
class RankCores {
 public:
  // A core's number plus one; 0: unknown. Written by its rank only. A hint.
  using Word = std::atomic<uint32_t>;

  RankCores() = default;
  RankCores(Word* own, std::vector<const Word*> others) : own_(own), others_(std::move(others)) {}

  // Publishes the core of this thread.
  void note() const;
  // Called by a waiting thread; looks around once a millisecond at most. Moves the thread to
  // another allowed core if that has at least two ranks fewer than its own. Afterwards the kernel
  // may move it again as before.
  void spread();

 private:
  static constexpr Clock::duration kInterval = std::chrono::milliseconds(1);

  bool isCrowded() const;
  void moveAway();

  Word* own_ = nullptr;
  std::vector<const Word*> others_;
  Clock::time_point nextLook_;
};

}  // namespace mooncake
