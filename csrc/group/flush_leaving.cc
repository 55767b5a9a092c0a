// How a rank leaves its group: when every other member has ended what it has.
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
  // Who is out of the job does not leave in peace: it is for the view to say so. And what an abort
  // ended here alone has not ended.
  if (membership_.isOver()) return;
  {
    const Step step(*this);
    take(machine_.leave());
    frozen_ = false;
    isLeftOut_ = false;
  }
  awaitLeaveSent(deadline);
}

// While we are here we can still be asked what a rank lacks, but nobody waits for that.
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
