#include "membership/view_report.h"

#include <algorithm>
#include <tuple>

namespace mooncake {

// Report, wire form, little-endian:
//   u8 form  u16 from  set committed  set gone  set unsettled  set suspected
//   for each rank that is gone or suspected, ascending: u8 cause  u16 by
// Gone ranks are usually settled, so the report lists the exceptions. A set: rank_set.h.
// Form 1 ends here: the first term, and no candidate is known. Form 2 goes on:
//   u32 number of the term  u32 its digest  u64 its epoch  bool hasClose
//   the close, if there is one:
//     u32 digest  set out, for each of them: u8 cause  u16 by
//     u8 newcomers (1 to 64), for each: u16 rank  id[16]  bool isOut
//   u8 joins (<= 64), for each: u16 rank  id[16]  u8 state, unless live: u8 cause  u16 by
// `from` has kCandidate added if the sender is a candidate.
namespace {

constexpr uint8_t kPlain = 1, kWithTerm = 2;
constexpr uint16_t kCandidate = 0x8000;
static_assert(JobRanks::kLimit <= kCandidate);

bool isKnown(Cause cause) { return cause >= Cause::kExited && cause <= Cause::kSeatTaken; }

template <typename One>
bool isBefore(const One& a, const One& b) {
  return std::tie(a.rank, a.id) < std::tie(b.rank, b.id);
}

template <typename One>
bool isAscending(const std::vector<One>& list) {
  return std::adjacent_find(list.begin(), list.end(), [](const One& a, const One& b) {
           return !isBefore(a, b);
         }) == list.end();
}

bool isConsistent(const Join& join, int ranks) {
  if (join.rank >= ranks || join.state > Join::State::kSettled) return false;
  if (join.state == Join::State::kLive) return true;
  if (!isKnown(join.cause) || join.by >= ranks) return false;
  return isCertain(join.cause) == (join.state != Join::State::kSuspected);
}

bool isConsistent(const Close& close, int ranks) {
  JobRanks filled;
  for (const Close::Newcomer& one : close.newcomers) {
    if (one.rank >= ranks || (!one.isOut && filled.contains(one.rank))) return false;
    if (!one.isOut) filled.add(one.rank);
  }
  for (const auto& [rank, cause, by] : close.out) {
    if (rank >= ranks || by >= ranks || !isKnown(cause)) return false;
  }
  return !close.newcomers.empty() && isAscending(close.newcomers);
}

bool isConsistent(const ViewReport& report, int ranks) {
  const JobRanks out = report.out();
  if (report.from >= ranks || out.end() > ranks) return false;
  if (out.contains(report.from) && !report.isCandidate) return false;
  if (!report.committed.isSubsetOf(out) || !report.settled.isSubsetOf(report.gone)) return false;
  for (const auto& [rank, cause, by] : report.accusations) {
    if (!isKnown(cause) || by >= ranks) return false;
    if (isCertain(cause) != report.gone.contains(rank)) return false;
  }
  if (report.close && (report.term.number == 0 || !isConsistent(*report.close, ranks)))
    return false;
  if (!std::ranges::all_of(report.joins,
                           [&](const Join& join) { return isConsistent(join, ranks); }))
    return false;
  return isAscending(report.joins) && (report.gone & report.suspected).empty();
}

EngineId readId(ByteReader& in) {
  EngineId id{};
  std::ranges::copy(in.getRaw(id.size()), id.begin());
  return id;
}

void writeReasons(ByteWriter& out, const std::vector<Accusation>& accusations) {
  for (const auto& [rank, cause, by] : accusations)
    out.put(static_cast<uint8_t>(cause)).put(static_cast<uint16_t>(by));
}

std::vector<Accusation> readReasons(ByteReader& in, const JobRanks& ranks) {
  std::vector<Accusation> accusations;
  ranks.forEach([&](int rank) {
    const auto cause = static_cast<Cause>(in.get<uint8_t>());
    accusations.push_back({rank, cause, in.get<uint16_t>()});
  });
  return accusations;
}

void writeTerm(ByteWriter& out, const ViewReport& report) {
  out.put(report.term.number).put(report.term.digest).put(report.epoch);
  out.put(report.close.has_value());
  if (report.close) {
    out.put(report.close->digest);
    report.close->outRanks().write(out);
    writeReasons(out, report.close->out);
    out.put(static_cast<uint8_t>(report.close->newcomers.size()));
    for (const Close::Newcomer& one : report.close->newcomers)
      out.put(static_cast<uint16_t>(one.rank)).putRaw(one.id).put(one.isOut);
  }
  out.put(static_cast<uint8_t>(report.joins.size()));
  for (const Join& join : report.joins) {
    out.put(static_cast<uint16_t>(join.rank)).putRaw(join.id);
    out.put(static_cast<uint8_t>(join.state));
    if (join.state == Join::State::kLive) continue;
    out.put(static_cast<uint8_t>(join.cause)).put(static_cast<uint16_t>(join.by));
  }
}

// Returns false if a list is too long.
bool readTerm(ByteReader& in, ViewReport& report) {
  report.term.number = in.get<uint32_t>();
  report.term.digest = in.get<uint32_t>();
  report.epoch = in.get<uint64_t>();
  if (in.get<bool>()) {
    Close& close = report.close.emplace();
    close.digest = in.get<uint32_t>();
    close.out = readReasons(in, JobRanks::read(in));
    const auto count = in.get<uint8_t>();
    if (count > ViewReport::kMostJoins) return false;
    for (int left = count; left > 0 && !in.failed(); --left) {
      const int rank = in.get<uint16_t>();
      const EngineId id = readId(in);
      close.newcomers.push_back({rank, id, in.get<bool>()});
    }
  }
  const auto count = in.get<uint8_t>();
  if (count > ViewReport::kMostJoins) return false;
  for (int left = count; left > 0 && !in.failed(); --left) {
    Join join;
    join.rank = in.get<uint16_t>();
    join.id = readId(in);
    join.state = static_cast<Join::State>(in.get<uint8_t>());
    if (join.state != Join::State::kLive) {
      join.cause = static_cast<Cause>(in.get<uint8_t>());
      join.by = in.get<uint16_t>();
    }
    report.joins.push_back(join);
  }
  return true;
}

}  // namespace

JobRanks Close::outRanks() const {
  JobRanks ranks;
  for (const Accusation& one : out) ranks.add(one.rank);
  return ranks;
}

Bytes encodeViewReport(const ViewReport& report) {
  const bool isPlain = report.term.number == 0 && report.joins.empty() && !report.isCandidate;
  ByteWriter out;
  out.put(isPlain ? kPlain : kWithTerm);
  out.put(static_cast<uint16_t>(report.from | (report.isCandidate ? kCandidate : 0)));
  report.committed.write(out);
  report.gone.write(out);
  (report.gone - report.settled).write(out);
  report.suspected.write(out);
  writeReasons(out, report.accusations);
  if (!isPlain) writeTerm(out, report);
  return out.take();
}

Result<ViewReport> decodeViewReport(ByteView bytes, int ranks) {
  ByteReader in(bytes);
  const auto form = in.get<uint8_t>();
  ViewReport report;
  const auto from = in.get<uint16_t>();
  report.from = from & ~kCandidate;
  report.isCandidate = (from & kCandidate) != 0;
  report.committed = JobRanks::read(in);
  report.gone = JobRanks::read(in);
  const JobRanks unsettled = JobRanks::read(in);
  report.settled = report.gone - unsettled;
  report.suspected = JobRanks::read(in);
  report.accusations = readReasons(in, report.out());
  const bool fits = form != kWithTerm || readTerm(in, report);
  if (fits) MOONCAKE_TRY(in.finish("view report"));
  if (!fits || (form != kPlain && form != kWithTerm) || (form == kPlain && report.isCandidate) ||
      !unsettled.isSubsetOf(report.gone) || !isConsistent(report, ranks)) {
    return Error{ErrorCode::kProtocol,
                 "a view report does not make sense: do all ranks run the same version?"};
  }
  return report;
}

}  // namespace mooncake
