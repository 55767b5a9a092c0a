#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/deadline.h"
#include "base/result.h"
#include "membership/flush.h"

namespace mooncake {

class FlushAgent;

// How the members of a group end its series of operations at one place, to go on in a successor
// with other members. A successor is named by a digest, which is the same on all members and never
// 0. Each member prepares it and says so; one of them wishes to move. A flush of this group then
// decides the place between two operations. Operations behind it answer kMoved and publish nothing,
// so the caller runs its call again in the successor. See section 9 of docs/membership.md.
//
// All functions may be called on any thread but the engine's, except as said.
class Renewal {
 public:
  explicit Renewal(FlushAgent& agent) : agent_(agent) {}

  // This rank has prepared the successor, and moves to it as soon as one member wishes to.
  // kExhausted: it is ready for two successors already. kMoved: the series has closed.
  Status readyFor(uint64_t successor);
  // Takes that back, and the wish for it. Waits while a flush is under way, which may still decide
  // it. Ok: the series never closes with this successor, unless this rank is ready for it again.
  // kMoved: it has closed with it. kTimeout: the flush had not ended at the deadline; this rank says
  // no more that it is ready, and the call may be repeated.
  Status notReadyFor(uint64_t successor, Deadline deadline);
  // This rank wishes to move to the successor as soon as all living members are ready for it. The
  // wish stays until a close is decided. A later wish replaces it; 0 takes it back. The caller first
  // waits for its own earlier calls, so that the close lies at this place of its program.
  void wishFor(uint64_t successor);

  // Set once the place has been decided and this rank has acted on the decision; it stays. Other
  // members may know it sooner or later. Any thread.
  std::optional<SeriesClose> close() const;
  // True: close() is set, or a flush is under way, which may set it. Any thread.
  bool mayClose() const;
  // True: the series has ended on this rank: close() is set, and its place is reached. No operation
  // begins here any more. Any thread; one load.
  bool hasEnded() const;
  // Waits for that. Returns the close, whose successor may be another one than the caller's.
  // kTimeout: names the members that are not ready for the successor that this rank wishes for.
  // Other errors: the group is over.
  Result<SeriesClose> awaitEnd(Deadline deadline);

  // Waits until all members are known to have ended the last operation of the series, or are gone,
  // and then leaves this group for good. Until then its agent answers, and peers read its window.
  // For a background thread; the group may be destroyed after it, and may not be used by another
  // thread meanwhile but for messages. kInvalidArgument: the series has not ended here. kTimeout:
  // names the members that have not ended it; the call may be repeated.
  Status leave(Deadline deadline);

  // -- for the thread that runs the group's operations

  // The call to which the last operation belonged has ended, see CallOfSeveral::endsHere().
  void callEnds();

 private:
  friend class FlushAgent;

  static Status moved();
  Error timedOut() const;

  // For the agent. The caller's thread asks isDecided() for each operation.
  bool isDecided() const { return isDecided_.load(std::memory_order_relaxed); }
  void closes(const SeriesClose& close);
  // The operation that the caller is about to begin is behind the end of the series. It counts for
  // none also if a flush has ended it: in mode `raise`, a flush ends the next number with a loss.
  // Its call runs in the successor on all ranks. Only for the caller's thread.
  bool isBehind(uint64_t number) const;
  // The operation is about to end well, and further ones of its call follow.
  void goesOnAfter(uint64_t number) { goesOnAfter_.store(number, std::memory_order_relaxed); }

  FlushAgent& agent_;
  std::atomic<bool> isDecided_{false};    // a close
  std::atomic<uint64_t> number_{0};       // of the close; written before isDecided_
  std::atomic<uint64_t> goesOnAfter_{0};  // last operation that left its call unfinished; 0: none
};

}  // namespace mooncake
