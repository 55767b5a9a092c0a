#include "peers/peer_verdict.h"

#include <algorithm>

namespace mooncake {
namespace {

using kernels::Decision;

// Number of the operation that the rank's kernels do next: not operations for which it was late.
uint64_t nextOf(const PeerReport& report) { return std::max(report.done, report.skipped) + 1; }

// Number of the last operation that has ended with data, as far as this report tells. A rank that
// was skipped knows that the other ranks had ended the operation before.
uint64_t endedBy(const PeerReport& report) {
  return report.done > report.skipped || report.skipped == 0 ? report.done : report.skipped - 1;
}

}  // namespace

PeerVerdict verdictFor(int rank, uint64_t active, std::span<const PeerReport> reports,
                       unsigned banks) {
  const auto isActive = [&](size_t r) { return active >> r & 1; };
  const auto all = [&](auto&& holds) {
    for (size_t r = 0; r < reports.size(); ++r)
      if (isActive(r) && !holds(reports[r])) return false;
    return true;
  };
  uint64_t last = 0, taken = 0, hadAll = 0, ended = 0;
  for (size_t r = 0; r < reports.size(); ++r) {
    if (!isActive(r)) continue;
    last = std::max(last, endedBy(reports[r]));
    taken = std::max(taken, reports[r].taken);
    hadAll = std::max(hadAll, reports[r].hadAll);
  }
  // The ranks that did not skip it are gone.
  while (all([&](const PeerReport& report) { return report.skipped > last; })) ++last;
  const bool areLevel = all([&](const PeerReport& report) { return nextOf(report) > last; });
  const bool isPatient = all([&](const PeerReport& report) { return report.late != last + 1; });
  const bool skips = areLevel && !isPatient;
  const auto isSkipped = [&](const PeerReport& report) {
    return report.skipped > last || (skips && report.stoppedAt != last + 1);
  };

  PeerVerdict verdict{.active = active, .partial = last + 1, .skips = skips};
  bool hasSkipped = false;
  for (size_t r = 0; r < reports.size(); ++r) {
    if (!isActive(r)) continue;
    const PeerReport& report = reports[r];
    hasSkipped |= report.skipped != 0;
    if (!isSkipped(report)) verdict.among |= uint64_t(1) << r;
    // The serial number of the last exchange of that operation. Ranks that have skipped operations
    // since count one exchange for each.
    if (report.done >= last) ended = std::max(ended, report.ended - (report.done - last));
  }
  // All are behind: they were skipped meanwhile.
  for (size_t r = 0; r < reports.size() && ended == 0; ++r)
    if (isActive(r)) ended = std::max(ended, reports[r].ended + (last - reports[r].done));
  // The bank of this exchange may still be read: by ranks that take the last operation, and in
  // inboxes of other ranks by ranks that are out and run. Of three banks, these may also read the
  // one before it (kernels/exchange.cuh). So the next exchange has the bank after it.
  if (hadAll && !hasSkipped) ended = hadAll;
  verdict.serial = kernels::serialAfterLoss(std::max(taken, ended), ended, banks);

  const PeerReport& own = reports[size_t(rank)];
  verdict.skipped = isSkipped(own) ? last + 1 : own.skipped;
  if (nextOf(own) <= last) {
    verdict.decision = Decision::kTake;
  } else {
    verdict.serial += own.done - last;
  }
  return verdict;
}

}  // namespace mooncake
