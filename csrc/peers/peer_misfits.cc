#include "peers/peer_misfits.h"

#include <algorithm>
#include <atomic>
#include <span>
#include <string>

namespace mooncake {

void PeerMisfits::take() {
  Lock lock(mutex_);
  takeLocked();
}

void PeerMisfits::takeLocked() {
  const uint32_t told = std::atomic_ref(words_.misfitCount).load(std::memory_order_acquire);
  for (; taken_ != told; ++taken_) {
    const kernels::Misfit& misfit = words_.misfits[taken_ % kernels::kMostMisfits];
    errors_.emplace(misfit.call, errorOf(misfit));
  }
  std::atomic_ref(words_.misfitsTaken).store(taken_, std::memory_order_release);
}

std::optional<Error> PeerMisfits::of(uint64_t call) {
  Lock lock(mutex_);
  takeLocked();
  const auto found = errors_.find(call);
  return found == errors_.end() ? std::nullopt : std::optional(found->second);
}

void PeerMisfits::forget(uint64_t call) {
  Lock lock(mutex_);
  takeLocked();
  errors_.erase(call);
}

Error PeerMisfits::errorOf(const kernels::Misfit& misfit) const {
  std::string text;
  const uint32_t count = std::min(misfit.count, kernels::kMisfitPairs);
  for (const kernels::Misfit::Pair& pair : std::span(misfit.pairs, count)) {
    text += (text.empty() ? "" : "; ") + group_.nameRank(pair.from) + " sends " +
            std::to_string(pair.sent) + " bytes to " + group_.nameRank(pair.to) +
            ", which expects " + std::to_string(pair.expected);
  }
  return {ErrorCode::kMismatch, "all_to_all of " + group_.nameRank(group_.rank()) +
                                    ": the splits do not fit: " + text + ". Nothing was changed"};
}

}  // namespace mooncake
