#include <algorithm>

#include "base/failpoint.h"
#include "group/operation.h"

namespace mooncake {

Status Writes::start(int to, const RemoteRegion& region, uint64_t offset,
                     std::span<const std::byte> data, size_t word) {
  failpoint("write-data");
  const Window& window = op_.group().window();
  Completion& completion = completions_.try_emplace(to, &window.bell()).first->second;
  const auto begun =
      window.write(to, region, offset, data, {.offset = word, .stamp = op_.stamp_}, completion);
  // A channel that broke, or a rank that we have fenced, is the membership's business.
  const ErrorCode code = begun.code();
  return code == ErrorCode::kPeerLost || code == ErrorCode::kAborted ? Status() : begun;
}

bool Writes::haveEnded() const {
  return std::ranges::all_of(completions_, [](const auto& one) { return one.second.finished(); });
}

Status Writes::await() {
  const auto waited = op_.waitUntil([&] { return haveEnded(); });
  if (waited.code() == ErrorCode::kTimeout) return op_.dataTimedOut();
  if (waited.ok()) completions_.clear();
  return waited;
}

std::vector<int> Writes::giveUp(Deadline deadline) {
  std::vector<int> ranks;
  if (!haveEnded()) {
    Waiter waiter = op_.waiter_;
    waiter.deadline = deadline;
    while (waiter.until([&] { return haveEnded(); }) == WaitResult::kInterrupted)
      waiter.generation = waiter.interrupt.generation();
  }
  for (const auto& [rank, completion] : completions_) {
    if (completion.finished()) continue;
    op_.group().window().cancel(completion);
    ranks.push_back(rank);
  }
  completions_.clear();
  return ranks;
}

}  // namespace mooncake
