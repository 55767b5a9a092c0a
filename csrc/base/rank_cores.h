#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/deadline.h"

namespace mooncake {

// On which cores the ranks of a group run, all on one host, as each has last said in a word that
// all of them map.
//
// Ranks that look for each other's stamps keep their cores busy, so the kernel finds no idle core
// when it wakes one of them, and now and then puts two on one core beside a free one. There they
// stay for a long time: each runs only while the other sleeps, which no load balancer takes for too
// much load. So a rank that waits, and finds its core crowded, goes to another one itself.
//
// Used by one thread at a time, the one that runs the operation.
class RankCores {
 public:
  // A core's number plus one; 0: not known. Written by its rank only, and only a hint.
  using Word = std::atomic<uint32_t>;

  RankCores() = default;
  RankCores(Word* own, std::vector<const Word*> others) : own_(own), others_(std::move(others)) {}

  // Says where this thread runs.
  void note() const;
  // For a thread that waits; at most every millisecond it has a look. When another core that it may
  // use has at least two ranks fewer than its own, it goes there: the kernel may place it anew from
  // then on, as before.
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
