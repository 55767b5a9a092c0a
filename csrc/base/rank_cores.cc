#include "base/rank_cores.h"

#include <algorithm>
#include <array>
#include <sched.h>

namespace mooncake {

void RankCores::note() const {
  const auto here = static_cast<uint32_t>(::sched_getcpu() + 1);
  // Peers read the word: a store takes the cache line from them each time.
  if (own_->load(std::memory_order_relaxed) != here) own_->store(here, std::memory_order_relaxed);
}

void RankCores::spread() {
  const auto now = Clock::now();
  if (now < nextLook_) return;
  nextLook_ = now + kInterval;
  note();
  if (isCrowded()) moveAway();
}

bool RankCores::isCrowded() const {
  const uint32_t here = own_->load(std::memory_order_relaxed);
  return here != 0 && std::ranges::any_of(others_, [&](const Word* word) {
           return word->load(std::memory_order_relaxed) == here;
         });
}

void RankCores::moveAway() {
  cpu_set_t allowed;
  // The host has more cores than the set holds: stay.
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  std::array<uint16_t, CPU_SETSIZE> others{};
  for (const Word* word : others_) {
    const uint32_t core = word->load(std::memory_order_relaxed);
    if (core >= 1 && core <= CPU_SETSIZE) ++others[core - 1];
  }
  const size_t here = std::min<size_t>(own_->load(std::memory_order_relaxed) - 1, CPU_SETSIZE - 1);
  size_t best = here;
  for (size_t step = 1; step < CPU_SETSIZE; ++step) {
    const size_t core = (here + step) % CPU_SETSIZE;
    if (CPU_ISSET(core, &allowed) && others[core] < others[best]) best = core;
  }
  if (best == here) return;
  // Announced before this thread moves. Otherwise the ranks that remain still see a crowded core
  // and all move, too.
  own_->store(static_cast<uint32_t>(best + 1), std::memory_order_relaxed);
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(best, &there);
  // The kernel moves a running thread only if the set lacks its core. Then the old set is restored.
  if (::sched_setaffinity(0, sizeof(there), &there) == 0)
    ::sched_setaffinity(0, sizeof(allowed), &allowed);
  note();
}

}  // namespace mooncake
