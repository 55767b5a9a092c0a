// What a rank does about an operation that the others have without it.
#include "base/failpoint.h"
#include "group/flush_agent.h"

namespace mooncake {

std::shared_ptr<const GroupView> FlushAgent::viewOf(const SkippingOperation& operation) const {
  auto view = std::make_shared<GroupView>(GroupView{.epoch = allView_->epoch});
  operation.contributors.forEach([&](int r) { view->active.push_back(r); });
  operation.skipped.forEach([&](int r) { view->skipped.push_back(r); });
  return view;
}

bool FlushAgent::haveEnded(const RankSet& ranks, uint64_t number) const {
  bool haveAll = true;
  ranks.forEach([&](int r) { haveAll = haveAll && endedOf(r) >= number; });
  return haveAll;
}

// Of what we are left out of, until all others have ended it. Who has ended it first may be gone by
// now, and then it may run again, with another end. Needs no deadline of its own: their operation
// has one, and the loss of one of them begins a flush, which ends this wait.
Status FlushAgent::awaitSkipped() {
  for (auto ask = Clock::now(); isLeftOut_.load(std::memory_order_acquire);) {
    if (auto usable = owner_.usable(); !usable.ok()) return usable;
    SkippingOperation operation;
    RankSet awaited;
    {
      std::lock_guard lock(mutex_);
      operation = machine_.leftOutOf();
      awaited = machine_.awaitedIn(operation);
    }
    if (operation.number == 0) continue;  // frozen anew
    Waiter waiter = owner_.waiter(Deadline::after(kLookAtWords));
    if (haveEnded(awaited, operation.number)) {
      failpoint("skipped");
      const Step step(*this);
      // Or a flush came between, and says how it ended.
      if (machine_.leftOutOf().number != operation.number) continue;
      take(machine_.skipped());
      view_ = allView_;
      isLeftOut_ = false;
      frozen_ = false;
      return {};
    }
    if (Clock::now() >= ask) {
      ask = Clock::now() + kAskAgain;
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
