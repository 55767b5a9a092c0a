#include "group/renewal.h"

#include "base/mutex.h"
#include "group/flush_agent.h"

namespace mooncake {

Status Renewal::moved() {
  return {ErrorCode::kMoved, "the group goes on in its successor, and the call belongs there"};
}

Status Renewal::readyFor(uint64_t successor) {
  const FlushAgent::Step step(agent_);
  if (agent_.machine_.close()) return moved();
  auto actions = agent_.machine_.readyFor(successor);
  if (!actions) {
    return {ErrorCode::kExhausted, "group '" + agent_.options_.group + "' on " +
                                       agent_.nameRank(agent_.options_.rank) + " is ready for " +
                                       std::to_string(kMostSuccessors) +
                                       " successors already: give one up first"};
  }
  agent_.take(std::move(*actions));
  return {};
}

// While a flush is under way, or was dropped for it, another member may have decided with the report
// that said that we are ready. Once we have acted, that member's report has told us.
Status Renewal::notReadyFor(uint64_t successor, Deadline deadline) {
  {
    const FlushAgent::Step step(agent_);
    agent_.take(agent_.machine_.notReadyFor(successor));
  }
  Waiter waiter = agent_.owner_.waiter(deadline);
  for (;;) {
    const auto how = waiter.until([&] {
      Lock lock(agent_.mutex_);
      return !agent_.machine_.isFrozen();
    });
    if (auto usable = agent_.owner_.usable(); !usable.ok()) return usable;
    if (how == WaitResult::kReady) break;
    waiter.generation = waiter.interrupt.generation();
    if (how == WaitResult::kTimeout) {
      return {ErrorCode::kTimeout, "group '" + agent_.options_.group + "' on " +
                                       agent_.nameRank(agent_.options_.rank) +
                                       " waited until the timeout for the end of a flush, which "
                                       "may still close the group's series. Call it again"};
    }
  }
  const auto close = this->close();
  return close && close->successor == successor ? moved() : Status();
}

void Renewal::wishFor(uint64_t successor) {
  const FlushAgent::Step step(agent_);
  agent_.machine_.wishesFor(successor, Clock::now());
  agent_.settle();
}

std::optional<SeriesClose> Renewal::close() const {
  Lock lock(agent_.mutex_);
  return agent_.machine_.close();
}

bool Renewal::mayClose() const {
  Lock lock(agent_.mutex_);
  return agent_.machine_.isFrozen() || agent_.machine_.close();
}

// An operation that ends with an error ends its call. So does one that ended without this rank's
// caller, with an error or because the caller was late: no operation that may leave out late ranks
// says that its call goes on.
bool Renewal::hasEnded() const {
  if (!isDecided_.load(std::memory_order_acquire)) return false;
  const uint64_t ended = agent_.endedWord_->load(std::memory_order_acquire);
  return ended >= number_.load(std::memory_order_relaxed) &&
         goesOnAfter_.load(std::memory_order_relaxed) < std::max<uint64_t>(ended, 1);
}

bool Renewal::isBehind(uint64_t number) const {
  return isDecided() && number > number_.load(std::memory_order_relaxed) &&
         goesOnAfter_.load(std::memory_order_relaxed) < std::max<uint64_t>(number - 1, 1);
}

Result<SeriesClose> Renewal::awaitEnd(Deadline deadline) {
  Waiter waiter = agent_.owner_.waiter(deadline);
  for (;;) {
    const auto how = waiter.until([&] { return hasEnded(); });
    if (auto usable = agent_.owner_.usable(); !usable.ok()) return usable;
    if (how == WaitResult::kReady) return *close();
    waiter.generation = waiter.interrupt.generation();
    if (how == WaitResult::kTimeout) return timedOut();
  }
}

Error Renewal::timedOut() const {
  const FlushState state = agent_.state();
  std::string why;
  if (state.close) {
    why = "an operation of a call that began before its close has not ended";
  } else if (!state.unready.empty()) {
    why = nameRanks(state.unready, agent_.options_.globalRanks) + " is not ready for the successor";
  } else {
    why = state.wish == 0 ? "no member that is known here wishes it"
                          : "no report of " + nameRanks(state.missing, agent_.options_.globalRanks);
  }
  return {ErrorCode::kTimeout, "group '" + agent_.options_.group + "' on " +
                                   agent_.nameRank(agent_.options_.rank) +
                                   " waited until the timeout for the end of its series: " + why};
}

Status Renewal::leave(Deadline deadline) {
  if (!hasEnded()) {
    return {ErrorCode::kInvalidArgument,
            "group '" + agent_.options_.group + "' on " + agent_.nameRank(agent_.options_.rank) +
                " cannot leave a series that has not ended: wait for awaitEnd() first"};
  }
  return agent_.leaveSeries(deadline);
}

void Renewal::callEnds() {
  goesOnAfter_.store(0, std::memory_order_relaxed);
  if (!isDecided()) return;
  const FlushAgent::Step step(agent_);
  agent_.settle();
}

void Renewal::closes(const SeriesClose& close) {
  number_.store(close.number, std::memory_order_relaxed);
  isDecided_.store(true, std::memory_order_release);
}

}  // namespace mooncake
