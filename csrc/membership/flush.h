#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "membership/rank_set.h"

// Decides how the current operation ends after an exceptional event: a member is out, a deadline
// passed, a rank cannot do its part. Every member stops where it is, reports how far it came, and
// draws the same conclusion from the same reports. Pure. Section 3 of docs/membership.md has the
// rules and their proof.
namespace mooncake {

// Identifies an attempt at an operation by the flush of the group that it follows. Only grows.
struct Attempt {
  uint32_t losses = 0;  // number of the group's own members that are out
  uint32_t round = 0;   // number of flushes within this epoch

  auto operator<=>(const Attempt&) const = default;
};

// An operation that ended with an error. One that ended well is not listed.
struct FailedOperation {
  uint64_t number = 0;
  Error error;
};

// The end of a group's series of operations, at a place between two of them. The members go on in
// a successor (docs/membership.md, section 9).
struct SeriesClose {
  uint64_t successor = 0;  // digest of the successor; the same on all members, never 0
  // The series ends behind the first operation, from this one on, with which a call ends. 0: before
  // the first operation.
  uint64_t number = 0;

  auto operator<=>(const SeriesClose&) const = default;
};
// Most successors for which a rank is ready at a time.
constexpr size_t kMostSuccessors = 2;

// An operation that ended well without the `skipped` ranks, which had not begun it in time.
struct SkippingOperation {
  uint64_t number = 0;
  GroupRanks contributors;
  GroupRanks skipped;
};

// The report of a rank that has stopped. Operations have numbers from 1 on.
struct FlushReport {
  enum class AbortReason : uint8_t { kNone, kTimeout, kAbort };  // about operation ended + 1

  int from = 0;  // rank in the group
  Attempt attempt;
  uint64_t ended = 0;  // the last operation that the rank has ended
  bool isOld = false;  // this epoch lost a rank, and this rank has acted on no decision of it
  AbortReason abort = AbortReason::kNone;
  Error why;                            // reason of the abort
  std::vector<FailedOperation> failed;  // the last kRemembered operations that ended with an error
  std::vector<SkippingOperation> skipping;  // the last kRememberedSkips without some ranks

  // The operation at which the rank stopped: ended + 1. A leave report repeats the value of the
  // rank's last report.
  uint64_t stoppedAt = 1;
  bool hasBegun = false;     // it has begun `stoppedAt`, as any attempt
  bool wantsToSkip = false;  // it wants to skip the ranks that have not begun `stoppedAt`

  std::vector<uint64_t> ready;         // successors that the rank has prepared; ascending, never 0
  uint64_t wish = 0;                   // the one of them to which the rank wishes to move; 0: none
  std::optional<SeriesClose> closing;  // the close that the rank has acted on
  // The rank has left, and did not report for this flush: it does not go on. Not sent.
  bool hasLeft = false;

  bool hasBegunNext() const { return hasBegun && stoppedAt == ended + 1; }
};

// Number of errors that a rank keeps for ranks behind it. These are behind by two operations at
// most, and by one more for every epoch in a row in which mode `raise` ends an operation.
constexpr uint64_t kRemembered = 32;
// A rank that must hear of a skip is behind by two operations at most.
constexpr size_t kRememberedSkips = 4;

struct FlushDecision {
  uint64_t next = 1;                        // the operation that is decided here
  Error error;                              // kOk: it starts again as the attempt of this flush
  std::vector<FailedOperation> failed;      // below `next`, ended with an error; by number
  std::vector<SkippingOperation> skipping;  // below `next`, ended well without some ranks
  std::vector<uint64_t> unfinished;         // below `next`, begun and not ended by some rank
  GroupRanks leftOut;                       // reporting ranks that are left out of `next`
  std::optional<SeriesClose> close;         // of the series, once it is decided

  // Returns the last operation that the reporting rank has ended once it has acted on this
  // decision, without fetching anything. The rank adopts the operation after that, or runs it
  // again. If it was left out of that operation, it waits until the other ranks have adopted it.
  uint64_t endedBy(const FlushReport& report) const;
  const Error* errorOf(uint64_t number) const;  // null: ended well, or starts again
  // True if no rank has yet to adopt this operation, which must be below `next`.
  bool isEndedByAll(uint64_t number) const;
};

// Decides from the reports of all members for one attempt. `lost` is the error with which mode
// `raise` ends one operation per epoch; null in mode `continue`.
FlushDecision decideFlush(std::span<const FlushReport* const> reports, const Error* lost);

Bytes encodeFlushReport(const FlushReport& report);
Result<FlushReport> decodeFlushReport(ByteReader& in, int size);

// A message between members of a group about its flushes.
struct FlushMessage {
  // kEnded answers kAsk, and goes from rank to rank when a group ends. kRepeat repeats a report, and
  // asks for the missing one of the receiver.
  enum class Kind : uint8_t { kReport = 1, kEnded, kLeft, kAsk, kRepeat };

  Kind kind = Kind::kReport;
  FlushReport report;  // for kReport, kLeft, kRepeat
  // For kEnded: the last operation that the sender has ended, the ranks of which the sender knows
  // that they have ended it, too, and the ranks of which it knows that they leave after it.
  uint64_t ended = 0;
  GroupRanks alsoEnded;
  GroupRanks leaving;
  std::vector<uint64_t> ready;  // for kEnded: successors that the sender has prepared
};

Bytes encodeFlushMessage(const FlushMessage& message);
// Decodes a message in a group of `size` ranks. kProtocol: the message is inconsistent.
Result<FlushMessage> decodeFlushMessage(ByteView bytes, int size);

}  // namespace mooncake
