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

// The patience of skipAfter() is for ranks that have not begun. It starts anew behind this wait,
// during which the others wait for us.
Status Writes::await() {
  const auto isOver = [&](const auto& one) {
    return one.second.finished() || !op_.takesPart(one.first);
  };
  op_.waiter_.deadline = op_.deadline_;
  const auto waited = op_.waitUntil([&] { return std::ranges::all_of(completions_, isOver); });
  if (waited.code() == ErrorCode::kTimeout) return op_.dataTimedOut();
  MOONCAKE_TRY(waited);
  std::erase_if(completions_, [](const auto& one) { return one.second.finished(); });
  if (op_.patience_) op_.waitToSkip(*op_.patience_);
  return {};
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
