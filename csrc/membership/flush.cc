#include "membership/flush.h"

#include <algorithm>
#include <string_view>

namespace mooncake {
namespace {

// Report, wire form, little-endian:
//   u16 from  u32 losses  u32 round  u64 ended  bool old  u8 abort  error why
//   u8 count, then for each failed operation, ascending:  u64 number  error
//   u64 stopped at  bool has begun it  bool wants to skip
//   u8 count, then for each operation that ended without some ranks, ascending:
//     u64 number  contributors  skipped
//   successors ready  u64 wish  bool has a close, then:  u64 its successor  u64 its number
// An error:  u8 code  string message
// Successors:  u8 count, then for each, ascending:  u64 digest
// Message:  u8 kind | report, or u64 ended  set also ended  set leaving  successors ready;
//   nothing for kAsk
constexpr size_t kMostText = 1024;

void writeError(ByteWriter& out, const Error& error) {
  out.put(static_cast<uint8_t>(error.code));
  out.putString(std::string_view(error.message).substr(0, kMostText));
}

Error readError(ByteReader& in) {
  const auto code = in.get<uint8_t>();
  std::string message = in.getString(kMostText);
  const bool isKnown = code <= static_cast<uint8_t>(kLastErrorCode);
  return {isKnown ? static_cast<ErrorCode>(code) : ErrorCode::kProtocol, std::move(message)};
}

void writeSuccessors(ByteWriter& out, std::span<const uint64_t> successors) {
  out.put(static_cast<uint8_t>(successors.size()));
  for (const uint64_t one : successors) out.put(one);
}

// A list with more than kMostSuccessors is cut behind one more, which areSuccessors() refuses.
std::vector<uint64_t> readSuccessors(ByteReader& in) {
  const size_t count = std::min<size_t>(in.get<uint8_t>(), kMostSuccessors + 1);
  std::vector<uint64_t> successors;
  for (size_t i = 0; i < count && !in.failed(); ++i) successors.push_back(in.get<uint64_t>());
  return successors;
}

bool areSuccessors(const std::vector<uint64_t>& successors) {
  return successors.size() <= kMostSuccessors &&
         std::ranges::is_sorted(successors, std::ranges::less_equal()) &&
         (successors.empty() || successors[0] != 0);
}

bool isClose(const std::optional<SeriesClose>& close) {
  return !close || (close->successor != 0 && close->number != ~uint64_t(0));
}

}  // namespace

uint64_t FlushDecision::endedBy(const FlushReport& report) const {
  // A rank that has not begun an operation that another rank has ended was left out of it.
  const auto isOver = [&](uint64_t number) {
    if (errorOf(number)) return true;
    const bool hasBegun = number == report.ended + 1 && report.hasBegunNext();
    return number < next && !hasBegun && isEndedByAll(number);
  };
  uint64_t ended = report.ended;
  while (ended < next && isOver(ended + 1)) ++ended;
  return ended;
}

bool FlushDecision::isEndedByAll(uint64_t number) const {
  return std::ranges::find(unfinished, number) == unfinished.end();
}

const Error* FlushDecision::errorOf(uint64_t number) const {
  if (number == next) return error.code == ErrorCode::kOk ? nullptr : &error;
  const auto found = std::find_if(failed.begin(), failed.end(),
                                  [&](const auto& one) { return one.number == number; });
  return found == failed.end() ? nullptr : &found->error;
}

namespace {

// No rank is left out of the next operation while a report says that its rank has yet to adopt the
// previous one. A rank that has adopted it since and has left counts, too: other ranks may have its
// earlier report.
void leaveOut(std::span<const FlushReport* const> reports, FlushDecision& decision) {
  const auto wishes = [&](const FlushReport* report) {
    return report->wantsToSkip && report->stoppedAt == decision.next;
  };
  const auto takesOver = [&](const FlushReport* report) {
    return report->hasBegun && report->stoppedAt < decision.next &&
           !decision.errorOf(report->stoppedAt);
  };
  if (std::ranges::none_of(reports, wishes) || std::ranges::any_of(reports, takesOver)) return;
  for (const FlushReport* report : reports) {
    if (!report->hasBegun || report->stoppedAt != decision.next) decision.leftOut.add(report->from);
  }
}

// A close that one rank has acted on stands. Else the series closes if one wishes it, and all that
// go on are ready: before `next`, or behind it if a rank has begun it or it ends with an error.
// Several wishes may be fulfilled; the smallest digest is.
void decideClose(std::span<const FlushReport* const> reports, FlushDecision& decision) {
  for (const FlushReport* report : reports) {
    if (report->closing && (!decision.close || *report->closing < *decision.close))
      decision.close = report->closing;
  }
  if (decision.close) return;
  const auto areAllReady = [&](uint64_t successor) {
    return std::ranges::all_of(reports, [&](const FlushReport* report) {
      return report->hasLeft || std::ranges::binary_search(report->ready, successor);
    });
  };
  uint64_t successor = 0;
  for (const FlushReport* report : reports) {
    const uint64_t wish = report->wish;
    if (wish != 0 && (successor == 0 || wish < successor) && areAllReady(wish)) successor = wish;
  }
  if (successor == 0) return;
  const bool isBegun = std::ranges::any_of(reports, [&](const FlushReport* report) {
    return report->ended + 1 == decision.next && report->hasBegunNext();
  });
  const bool isBehind = isBegun || decision.error.code != ErrorCode::kOk;
  decision.close = {successor, isBehind ? decision.next : decision.next - 1};
}

void decideNext(std::span<const FlushReport* const> reports, const Error* lost,
                FlushDecision& decision) {
  // An abort about an operation that another rank has ended is void.
  const auto firstOf = [&](auto&& which) {
    const FlushReport* first = nullptr;
    for (const FlushReport* report : reports) {
      const bool fits = report->ended + 1 == decision.next && which(*report);
      if (fits && (!first || report->from < first->from)) first = report;
    }
    return first;
  };
  if (lost && firstOf([](const FlushReport& report) { return report.isOld; })) {
    decision.error = *lost;
    return;
  }
  for (const auto abort : {FlushReport::AbortReason::kTimeout, FlushReport::AbortReason::kAbort}) {
    if (const auto* from = firstOf([&](const auto& report) { return report.abort == abort; })) {
      decision.error = from->why;
      return;
    }
  }
  leaveOut(reports, decision);
}

}  // namespace

FlushDecision decideFlush(std::span<const FlushReport* const> reports, const Error* lost) {
  FlushDecision decision;
  uint64_t lowest = ~uint64_t(0);
  for (const FlushReport* report : reports) {
    decision.next = std::max(decision.next, report->ended + 1);
    lowest = std::min({lowest, report->ended, report->stoppedAt - 1});
  }
  // A survivor has ended every operation below `next`, so these are decided.
  for (const FlushReport* report : reports) {
    for (const FailedOperation& one : report->failed) {
      if (one.number > lowest && !decision.errorOf(one.number)) decision.failed.push_back(one);
    }
  }
  std::ranges::sort(decision.failed, {}, &FailedOperation::number);
  for (const FlushReport* report : reports) {
    for (const SkippingOperation& one : report->skipping) {
      const bool isNew = std::ranges::find(decision.skipping, one.number,
                                           &SkippingOperation::number) == decision.skipping.end();
      if (one.number > lowest && isNew) decision.skipping.push_back(one);
    }
    if (report->hasBegunNext() && report->ended + 1 < decision.next &&
        !decision.errorOf(report->ended + 1))
      decision.unfinished.push_back(report->ended + 1);
  }
  decideNext(reports, lost, decision);
  decideClose(reports, decision);
  return decision;
}

Bytes encodeFlushReport(const FlushReport& report) {
  ByteWriter out;
  out.put(static_cast<uint16_t>(report.from))
      .put(report.attempt.losses)
      .put(report.attempt.round)
      .put(report.ended)
      .put(report.isOld)
      .put(static_cast<uint8_t>(report.abort));
  writeError(out, report.why);
  out.put(static_cast<uint8_t>(report.failed.size()));
  for (const auto& [number, error] : report.failed) {
    out.put(number);
    writeError(out, error);
  }
  out.put(report.stoppedAt)
      .put(report.hasBegun)
      .put(report.wantsToSkip)
      .put(static_cast<uint8_t>(report.skipping.size()));
  for (const auto& [number, contributors, skipped] : report.skipping) {
    out.put(number);
    contributors.write(out);
    skipped.write(out);
  }
  writeSuccessors(out, report.ready);
  out.put(report.wish).put(report.closing.has_value());
  if (report.closing) out.put(report.closing->successor).put(report.closing->number);
  return out.take();
}

Result<FlushReport> decodeFlushReport(ByteReader& in, int size) {
  FlushReport report;
  report.from = in.get<uint16_t>();
  report.attempt.losses = in.get<uint32_t>();
  report.attempt.round = in.get<uint32_t>();
  report.ended = in.get<uint64_t>();
  report.isOld = in.get<bool>();
  const auto abort = in.get<uint8_t>();
  report.abort = static_cast<FlushReport::AbortReason>(abort);
  report.why = readError(in);
  const auto count = in.get<uint8_t>();
  for (int i = 0; i < count && !in.failed(); ++i) {
    const auto number = in.get<uint64_t>();
    report.failed.push_back({number, readError(in)});
  }
  report.stoppedAt = in.get<uint64_t>();
  report.hasBegun = in.get<bool>();
  report.wantsToSkip = in.get<bool>();
  const auto skips = in.get<uint8_t>();
  for (int i = 0; i < skips && !in.failed(); ++i) {
    const auto number = in.get<uint64_t>();
    GroupRanks contributors = GroupRanks::read(in);
    report.skipping.push_back({number, std::move(contributors), GroupRanks::read(in)});
  }
  report.ready = readSuccessors(in);
  report.wish = in.get<uint64_t>();
  if (in.get<bool>()) {
    const auto successor = in.get<uint64_t>();
    report.closing = SeriesClose{successor, in.get<uint64_t>()};
  }
  MOONCAKE_TRY(in.finish("flush report"));
  const bool ascending =
      std::ranges::is_sorted(report.failed, std::ranges::less_equal(), &FailedOperation::number);
  const bool areEnded = report.failed.empty() || report.failed.back().number <= report.ended;
  const bool areErrors = std::ranges::none_of(
      report.failed, [](const auto& one) { return one.error.code == ErrorCode::kOk; });
  const bool areSkipsEnded = std::ranges::all_of(report.skipping, [&](const auto& one) {
    return one.number <= report.ended && one.contributors.end() <= size &&
           one.skipped.end() <= size;
  });
  const bool isStoppedSomewhere = report.stoppedAt >= 1 && report.stoppedAt <= report.ended + 1 &&
                                  (report.hasBegun || !report.wantsToSkip);
  const bool isOfSeries = areSuccessors(report.ready) && isClose(report.closing);
  const bool aborts = report.abort != FlushReport::AbortReason::kNone;
  if (report.from >= size || report.attempt.losses >= static_cast<uint32_t>(size) ||
      abort > static_cast<uint8_t>(FlushReport::AbortReason::kAbort) ||
      aborts != (report.why.code != ErrorCode::kOk) || count > kRemembered || !ascending ||
      !areEnded || !areErrors || skips > kRememberedSkips || !areSkipsEnded ||
      !isStoppedSomewhere || !isOfSeries || report.ended == ~uint64_t(0)) {
    return Error{ErrorCode::kProtocol,
                 "a flush report does not make sense: do all ranks run the "
                 "same version?"};
  }
  return report;
}

Bytes encodeFlushMessage(const FlushMessage& message) {
  using Kind = FlushMessage::Kind;
  ByteWriter out;
  out.put(static_cast<uint8_t>(message.kind));
  if (message.kind == Kind::kEnded) {
    out.put(message.ended);
    message.alsoEnded.write(out);
    message.leaving.write(out);
    writeSuccessors(out, message.ready);
  } else if (message.kind != Kind::kAsk) {
    out.putRaw(encodeFlushReport(message.report));
  }
  return out.take();
}

Result<FlushMessage> decodeFlushMessage(ByteView bytes, int size) {
  using Kind = FlushMessage::Kind;
  ByteReader in(bytes);
  FlushMessage message{.kind = static_cast<Kind>(in.get<uint8_t>())};
  switch (message.kind) {
    case Kind::kReport:
    case Kind::kLeft:
    case Kind::kRepeat: {
      auto report = decodeFlushReport(in, size);
      if (!report.ok()) return report.error();
      message.report = std::move(*report);
      return message;
    }
    case Kind::kEnded:
      message.ended = in.get<uint64_t>();
      message.alsoEnded = GroupRanks::read(in);
      message.leaving = GroupRanks::read(in);
      message.ready = readSuccessors(in);
      MOONCAKE_TRY(in.finish("flush message"));
      if (message.alsoEnded.end() <= size && message.leaving.end() <= size &&
          areSuccessors(message.ready))
        return message;
      break;
    case Kind::kAsk:
      MOONCAKE_TRY(in.finish("flush message"));
      return message;
  }
  return Error{ErrorCode::kProtocol,
               "a flush message does not make sense: do all ranks run the "
               "same version?"};
}

}  // namespace mooncake
