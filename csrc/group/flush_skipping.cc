// How a rank ends an operation that the other ranks run without it.
#include "base/backoff.h"
#include "base/failpoint.h"
#include "base/mutex.h"
#include "group/flush_agent.h"

namespace mooncake {

std::shared_ptr<const GroupView> FlushAgent::viewOf(const SkippingOperation& operation) const {
  auto view = std::make_shared<GroupView>(GroupView{.epoch = allView_->epoch});
  operation.contributors.forEach([&](int r) { view->active.push_back(r); });
  operation.skipped.forEach([&](int r) { view->skipped.push_back(r); });
  return view;
}

bool FlushAgent::haveEnded(const GroupRanks& ranks, uint64_t number) const {
  bool haveAll = true;
  ranks.forEach([&](int r) { haveAll = haveAll && endedOf(r) >= number; });
  return haveAll;
}

// If we are left out of an operation, waits until all of its contributors have ended it. The end on
// one of them is not enough: if that rank is lost, the operation may run again and end otherwise.
// Needs no deadline of its own: the contributors' operation has one. The loss of a contributor
// begins a flush, which ends this wait.
Status FlushAgent::awaitSkipped() {
  std::optional<Repetition> asking;
  while (isLeftOut_.load(std::memory_order_acquire)) {
    if (auto usable = owner_.usable(); !usable.ok()) return usable;
    SkippingOperation operation;
    GroupRanks awaited;
    {
      Lock lock(mutex_);
      operation = machine_.leftOutOf();
      awaited = machine_.awaitedIn(operation);
    }
    if (operation.number == 0) continue;  // frozen again
    Waiter waiter = owner_.waiter(Deadline::after(kLookAtWords));
    if (haveEnded(awaited, operation.number)) {
      failpoint("skipped");
      const Step step(*this);
      // A flush has come between: it says how the operation ended.
      if (machine_.leftOutOf().number != operation.number) continue;
      take(machine_.skipped());
      view_ = allView_;
      isLeftOut_ = false;
      frozen_ = false;
      return {};
    }
    if (!asking || asking->takeDue(Clock::now())) {
      if (!asking) asking.emplace(Repetition::Limits{kAskAgain, kMostPause}, Clock::now());
      FlushAction::Tell question{{}, {.kind = FlushMessage::Kind::kAsk}};
      awaited.forEach([&](int r) {
        if (!owner_.endedWordOf(r) && endedOf(r) < operation.number) question.to.push_back(r);
      });
      const Step step(*this);
      if (!question.to.empty()) take(question);
    }
    waiter.until([&] { return !isLeftOut_.load(std::memory_order_acquire); });
  }
  return {};
}

}  // namespace mooncake
