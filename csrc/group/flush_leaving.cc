// How a rank leaves its group: it waits until every other member has ended the same operations.
#include "base/failpoint.h"
#include "group/flush_agent.h"

namespace mooncake {

void FlushAgent::awaitEnded(uint64_t number, Deadline deadline) {
  const auto size = static_cast<int>(options_.jobRanks.size());
  const auto isDone = [&](int r) {
    return r == options_.rank || !isActive(r) || endedOf(r) >= number;
  };
  const auto allDone = [&] {
    for (int r = 0; r < size; ++r) {
      if (!isDone(r)) return false;
    }
    return true;
  };
  for (auto ask = Clock::now(); !allDone() && owner_.usable().ok() && !deadline.passed();) {
    Clock::duration look = kAskAgain;
    for (int r = 0; r < size; ++r) {
      if (isDone(r)) continue;
      if (owner_.endedWordOf(r)) {
        look = kLookAtWords;
      } else if (Clock::now() >= ask) {
        const Step step(*this);
        FlushAction::Tell question{{r}, {.kind = FlushMessage::Kind::kAsk}};
        take(question);
      }
    }
    if (Clock::now() >= ask) ask = Clock::now() + kAskAgain;
    Waiter waiter = owner_.waiter(deadline.earlier(Deadline::after(look)));
    waiter.until(allDone);
  }
}

void FlushAgent::leave(uint64_t number, Deadline deadline) {
  awaitEnded(number, deadline);
  failpoint("leave");
  // A rank that is out of the job sends no leave report: the view takes it out. An operation that
  // only an abort ended here does not count as ended in the report.
  if (membership_.isOver()) return;
  {
    const Step step(*this);
    take(machine_.leave());
    frozen_ = false;
    isLeftOut_ = false;
  }
  awaitLeaveSent(deadline);
}

// Members may still ask us for parts that they lack while we wait, but none depends on it.
void FlushAgent::awaitLeaveSent(Deadline deadline) {
  for (;;) {
    {
      const Step step(*this);
      if (outbox_.sendAgain()) return;
    }
    if (deadline.passed() || !owner_.usable().ok()) return;
    owner_.waiter(deadline.earlier(Deadline::after(kLookAtWords))).until([] { return false; });
  }
}

}  // namespace mooncake
