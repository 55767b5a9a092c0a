// How a rank leaves its group: it waits until every other member has ended the same operations.
#include <algorithm>

#include "base/backoff.h"
#include "base/failpoint.h"
#include "base/mutex.h"
#include "group/flush_agent.h"

namespace mooncake {
namespace {

// How often members are asked at most.
constexpr int kMostRepetitions = 16;
// How long a rank that leaves collects goodbyes, as a multiple of the first pause. The other ranks
// that leave, too, are gone by then.
constexpr int kGoodbyes = 4;
// Number of members that are asked at first. Each later time asks eight times as many.
constexpr size_t kAskedFirst = 2;

}  // namespace

// Members that leave tell each other (FlushMachine::leaving). A member that does not leave yet is
// asked. The first pause gives all members the time to come, so that most need neither a question
// nor our leave report.
bool FlushAgent::awaitEnded(uint64_t number, Deadline deadline, Leavers leavers) {
  const auto size = static_cast<int>(options_.jobRanks.size());
  const auto hasEnded = [&](int r) REQUIRES(mutex_) {
    if (r == options_.rank || !machine_.isActive(r)) return true;
    if (const auto& peer = *options_.roster->peer(options_.jobRanks[size_t(r)]);
        peer.disconnected) {
      const auto how = peer.evidence.kind;
      if (how == Evidence::Kind::kGoodbye || how == Evidence::Kind::kEnded) {
        machine_.saidGoodbye(r);
        return true;
      }
    }
    if (const auto* word = owner_.endedWordOf(r))
      machine_.peerHasEnded(r, word->load(std::memory_order_acquire));
    return machine_.knownEnded()[size_t(r)] >= number;
  };
  std::vector<int> missing;  // members that have not ended, from just below us down
  Repetition asking({pauseFor(size), kMostPause, kMostRepetitions}, Clock::now());
  Repetition looking({kLookAtWords, kAskAgain}, Clock::now());
  const auto isOver = [&]() REQUIRES(mutex_) {
    missing.clear();
    for (int back = 1; back < size; ++back) {
      const int r = (options_.rank + size - back) % size;
      if (!hasEnded(r)) missing.push_back(r);
    }
    return missing.empty() &&
           (leavers == Leavers::kOnlyUs || asking.count() > 0 || machine_.doAllLeave());
  };
  const auto holdGoodbyes = [&] {
    if (leavers != Leavers::kWholeJob) return;
    membership_.holdGoodbyes(Clock::now() +
                             std::min<Clock::duration>(kGoodbyes * pauseFor(size), kMostPause));
  };
  holdGoodbyes();
  while (owner_.usable().ok() && !deadline.passed()) {
    Clock::time_point look = asking.next();
    {
      const Step step(*this);
      const bool isDue = asking.takeDue(Clock::now());
      const bool wasOver = isOver();
      take(machine_.leaving(number));
      if (wasOver) {
        holdGoodbyes();
        return true;
      }
      if (std::erase_if(missing, [&](int r) { return owner_.endedWordOf(r) != nullptr; }) > 0) {
        (void)looking.takeDue(Clock::now());
        look = std::min(look, looking.next());
      }
      if (isDue) {
        holdGoodbyes();
        // The members just below us have heard of most.
        missing.resize(std::min(missing.size(), kAskedFirst << 3 * (asking.count() - 1)));
        FlushAction::Tell question{missing, {.kind = FlushMessage::Kind::kAsk}};
        take(question);
      }
    }
    owner_.waiter(deadline.earlier(Deadline::at(look))).until([&] {
      Lock lock(mutex_);
      return isOver();
    });
  }
  return false;
}

void FlushAgent::awaitEnded(uint64_t number, Deadline deadline) {
  (void)awaitEnded(number, deadline, Leavers::kWholeJob);
}

bool FlushAgent::doAllLeave() {
  const Step step(*this);
  return machine_.doAllLeave();
}

void FlushAgent::leave(uint64_t number, Deadline deadline) {
  awaitEnded(number, deadline);
  (void)sendLeave(deadline);
}

// Unlike leave(), it does not go before all have ended the series: another member may still need
// this rank for the last operation, or for the close.
Status FlushAgent::leaveSeries(Deadline deadline, Leavers leavers) {
  {
    // The members owe a rank that has left no answers, so a second wait for them would not end.
    Lock lock(mutex_);
    if (machine_.hasLeft()) return {};
  }
  const uint64_t last = ended();
  if (!awaitEnded(last, deadline, leavers)) {
    MOONCAKE_TRY(owner_.usable());
    std::vector<int> missing;
    Lock lock(mutex_);
    for (int r = 0; r < int(options_.jobRanks.size()); ++r) {
      if (r != options_.rank && machine_.isActive(r) && machine_.knownEnded()[size_t(r)] < last)
        missing.push_back(r);
    }
    return {ErrorCode::kTimeout,
            "group '" + options_.group + "' on " + nameRank(options_.rank) +
                " cannot leave its closed series yet: " + nameRanks(missing, options_.globalRanks) +
                " has not ended operation #" + std::to_string(last) + ". Call it again"};
  }
  return sendLeave(deadline);
}

Status FlushAgent::sendLeave(Deadline deadline) {
  failpoint("leave");
  // A rank that is out of the job sends no leave report: the view takes it out. An operation that
  // only an abort ended here does not count as ended in the report.
  if (membership_.isOver()) return owner_.usable();
  {
    const Step step(*this);
    take(machine_.leave());
    frozen_ = false;
    isLeftOut_ = false;
  }
  awaitLeaveSent(deadline);
  return {};
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
