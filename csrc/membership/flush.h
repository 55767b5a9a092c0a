#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "membership/rank_set.h"

// How the operation under way ends when something exceptional happens: a member is out, a deadline
// passed, a rank cannot do its part. Every member stops where it is, reports how far it came, and
// draws the same conclusion from the same reports. Pure; the rules and their proof are section 3 of
// docs/membership.md.
namespace mooncake {

// Which flush of a group an attempt at an operation follows. Only grows.
struct Attempt {
  uint32_t losses = 0;  // how many of the group's own members are out
  uint32_t round = 0;   // flushes within this epoch

  auto operator<=>(const Attempt&) const = default;
};

// How an operation ended that did not end well. What ended well needs no words.
struct FailedOperation {
  uint64_t number = 0;
  Error error;
};

// How an operation ended that ended well and without some, who had not begun it in time.
struct SkippingOperation {
  uint64_t number = 0;
  RankSet contributors;
  RankSet skipped;
};

// What a rank says once it has stopped. Operations have numbers from 1 on.
struct FlushReport {
  enum class AbortReason : uint8_t { kNone, kTimeout, kAbort };  // about operation ended + 1

  int from = 0;  // rank in the group
  Attempt attempt;
  uint64_t ended = 0;  // the last operation that it has ended
  bool isOld = false;  // it has not acted on any decision of this epoch
  AbortReason abort = AbortReason::kNone;
  Error why;                                // of the abort
  std::vector<FailedOperation> failed;      // of the last kRemembered operations that it has ended
  std::vector<SkippingOperation> skipping;  // of the last kRememberedSkips of these that it ended

  // The operation that it was stopped at: ended + 1, but of who has left what its last report said.
  uint64_t stoppedAt = 1;
  bool hasBegun = false;     // that operation, as any attempt
  bool wantsToSkip = false;  // whoever has not begun it

  bool hasBegunNext() const { return hasBegun && stoppedAt == ended + 1; }
};

// How many operations a rank may be asked about: behind by two at most, and by one more for every
// epoch in a row that mode `raise` ends one with.
constexpr uint64_t kRemembered = 32;
// Who is told of them is behind by two at most.
constexpr size_t kRememberedSkips = 4;

struct FlushDecision {
  uint64_t next = 1;                        // the operation that is decided here
  Error error;                              // kOk: it starts again as the attempt of this flush
  std::vector<FailedOperation> failed;      // those below it that ended with an error, by number
  std::vector<SkippingOperation> skipping;  // those below it that ended well and without some
  std::vector<uint64_t> unfinished;  // those below it that somebody has begun and not ended yet
  RankSet leftOut;                   // of those who reported: who goes without the next one

  // The last operation that a rank has ended when it has done what is decided for it without
  // needing anything: the next one, up to `next`, has to be taken over, or starts again; or it was
  // left out of that one, and others are still to take it over.
  uint64_t endedBy(const FlushReport& report) const;
  const Error* errorOf(uint64_t number) const;  // null: ended well, or starts again
  // Below the next one: nobody has to take it over any more.
  bool isEndedByAll(uint64_t number) const;
};

// Of the reports of all members with one attempt. `lost` is the error that mode `raise` ends one
// operation per epoch with; null in mode `continue`.
FlushDecision decideFlush(std::span<const FlushReport* const> reports, const Error* lost);

Bytes encodeFlushReport(const FlushReport& report);
Result<FlushReport> decodeFlushReport(ByteReader& in, int size);

// What members of a group say to each other of its flushes.
struct FlushMessage {
  // kAsk is answered by kEnded. kRepeat is a report that was sent before and asks for the
  // receiver's, which has come to nobody there.
  enum class Kind : uint8_t { kReport = 1, kEnded, kLeft, kAsk, kRepeat };

  Kind kind = Kind::kReport;
  FlushReport report;  // of kReport, kLeft, kRepeat
  uint64_t ended = 0;  // of kEnded: the last operation that the sender has ended
};

Bytes encodeFlushMessage(const FlushMessage& message);
// In a group of `size` ranks. kProtocol: what came makes no sense.
Result<FlushMessage> decodeFlushMessage(ByteView bytes, int size);

}  // namespace mooncake
