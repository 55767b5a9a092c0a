#include "group/group_state.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "base/rank_list.h"
#include "group/group.h"

namespace mooncake {
namespace {

using StampWord = std::atomic<uint64_t> Slot::*;

// The slots that a rank has published. They may change while we read them, unless the group is
// stuck.
class Slots {
 public:
  Slots(const Group& group, int rank) {
    std::byte* part = group.window().peerPtr(rank);
    const PartLayout& layout = group.layout();
    for (const uint64_t number : {0, 1}) {
      slots_[number] = reinterpret_cast<const Slot*>(part ? part + layout.ownSlot(number)
                                                          : group.window().local() +
                                                                layout.inboxSlot(rank, number));
    }
  }
  const Slot& of(uint64_t number) const { return *slots_[number & 1]; }
  uint64_t stamp(uint64_t number, StampWord word) const {
    return (of(number).*word).load(std::memory_order_acquire);
  }
  // The last operation that it has stamped; 0: none.
  uint64_t last(StampWord word) const {
    return std::max(stampNumber(stamp(0, word)), stampNumber(stamp(1, word)));
  }

 private:
  const Slot* slots_[2];
};

std::string numbered(uint64_t number) {
  return number == 0 ? std::string("none") : "#" + std::to_string(number);
}

std::string nameOf(const Attempt& attempt) {
  return std::to_string(attempt.losses) + "." + std::to_string(attempt.round);
}

class Description {
 public:
  explicit Description(const Group& group)
      : group_(group), self_(group.rank()), flush_(group.agent().state()) {
    for (int r = 0; r < group.size(); ++r) slots_.emplace_back(group, r);
    begun_ = slots_[self_].last(&Slot::begun);
    ended_ = group.endedWord(self_).load(std::memory_order_acquire);
  }

  std::string text() const {
    std::ostringstream out;
    out << "group '" << group_.name() << "': " << group_.nameRank(self_) << " " << whatItDoes()
        << "\n";
    out << "  epoch " << flush_.viewEpoch << ", attempt " << nameOf(flush_.attempt) << ", ";
    if (flush_.isFrozen) {
      out << "frozen for the flush " << nameOf(flush_.target);
    } else {
      out << "not frozen";
    }
    out << "\n";
    for (int r = 0; r < group_.size(); ++r) out << "  " << lineOf(r) << "\n";
    return out.str();
  }

 private:
  bool isInOperation() const { return begun_ > ended_; }
  std::string operation(uint64_t number, int rank) const {
    const Call call = slots_[rank].of(number).call;
    return std::string(verbName(call.verb)) + " #" + std::to_string(number);
  }
  bool isIn(int rank) const {
    return std::ranges::binary_search(flush_.active, rank) &&
           !std::ranges::binary_search(flush_.left, rank);
  }
  // The other active ranks for which the predicate is false.
  template <typename Predicate>
  std::vector<int> without(Predicate&& predicate) const {
    std::vector<int> ranks;
    for (int r = 0; r < group_.size(); ++r) {
      if (r != self_ && isIn(r) && !predicate(r)) ranks.push_back(r);
    }
    return ranks;
  }
  std::vector<int> withoutStamp(StampWord word) const {
    const uint64_t ours = slots_[self_].stamp(begun_, &Slot::begun);
    return without([&](int r) { return slots_[r].stamp(begun_, word) == ours; });
  }
  bool hasStamped(StampWord word) const {
    return slots_[self_].stamp(begun_, word) == slots_[self_].stamp(begun_, &Slot::begun);
  }

  std::string whatItDoes() const {
    if (const Status usable = group_.usable(); !usable.ok())
      return "cannot go on: " + usable.error().message;
    if (flush_.isFrozen) return inFlush();
    if (isInOperation()) return inOperation();
    if (flush_.isBusy) {
      const auto slow = without([&](int r) { return endedOf(r) + 1 >= ended_; });
      return "begins #" + std::to_string(ended_ + 1) +
             (slow.empty() ? ""
                           : " and waits until " + group_.nameRanks(slow) + " has ended #" +
                                 std::to_string(ended_ - 1));
    }
    const auto ahead = without([&](int r) { return slots_[r].last(&Slot::begun) <= ended_; });
    return "is in no operation, the last one that it ended is " + numbered(ended_) +
           (ahead.empty() ? ""
                          : "; " + group_.nameRanks(ahead) + " began " +
                                operation(ended_ + 1, ahead[0]) + ", which it has not called");
  }

  std::string inFlush() const {
    if (!flush_.hasReported) {
      return flush_.isBusy ? "is interrupted and reports when its operation stops"
                           : "is interrupted and waits for the view of the flush";
    }
    return "is interrupted and waits for the reports of " + group_.nameRanks(flush_.missing);
  }

  std::string inOperation() const {
    const std::string waits = "waits in " + operation(begun_, self_) + " for ";
    if (const auto ranks = withoutStamp(&Slot::begun); !ranks.empty()) {
      const bool isAgain = slots_[ranks[0]].last(&Slot::begun) == begun_;
      RankTexts ends;
      for (const int r : ranks)
        ends.add(r, numbered(endedOf(r)) + (isMapped(r) ? "" : " at least"));
      const auto phrase = [this](const std::vector<int>& alike, const std::string& number) {
        return "the last ended operation of " + group_.nameRanks(alike) + " is " + number;
      };
      return waits + group_.nameRanks(ranks) +
             (ranks.size() == 1 ? ", which has" : ", which have") +
             (isAgain ? " not begun it again; " : " not called it; ") + ends.join("; ", phrase);
    }
    for (const auto word : {&Slot::done, &Slot::ready}) {
      if (!hasStamped(word)) continue;
      const auto ranks = withoutStamp(word);
      if (ranks.empty()) break;
      return waits + group_.nameRanks(ranks) + ", which began it and " +
             (word == &Slot::done ? "has not got all that it needs" : "has not computed its share");
    }
    return "moves or reduces the data of " + operation(begun_, self_) + ", which all have begun";
  }

  bool isMapped(int rank) const { return group_.window().peerPtr(rank) != nullptr; }
  uint64_t endedOf(int rank) const {
    if (isMapped(rank)) return group_.endedWord(rank).load(std::memory_order_acquire);
    // A rank that has begun an operation has ended the one before.
    const uint64_t begun = slots_[rank].last(&Slot::begun);
    return std::max(flush_.ended[rank], begun > 0 ? begun - 1 : 0);
  }

  std::string lineOf(int rank) const {
    const Slots& slots = slots_[rank];
    std::string text = group_.nameRank(rank) + (rank == self_ ? " (this one)" : "") + ": begun " +
                       numbered(slots.last(&Slot::begun)) + ", ready " +
                       numbered(slots.last(&Slot::ready)) + ", done " +
                       numbered(slots.last(&Slot::done)) + ", ended " + numbered(endedOf(rank)) +
                       (isMapped(rank) ? "" : " at least");
    if (rank == self_ && isInOperation()) text += ", called " + describeCall(slots.of(begun_).call);
    if (rank != self_ && !isIn(rank)) text += "; out: " + group_.whyGone(rank);
    return text;
  }

  const Group& group_;
  const int self_;
  const FlushState flush_;
  std::vector<Slots> slots_;
  uint64_t begun_ = 0;
  uint64_t ended_ = 0;
};

}  // namespace

std::string describeState(const Group& group) { return Description(group).text(); }

}  // namespace mooncake
