#include "membership/held_reports.h"

#include <algorithm>
#include <utility>

namespace mooncake {
namespace {

bool mustWait(const ViewReport& report, const JobRanks& known) {
  return std::ranges::any_of(report.accusations, [&](const Accusation& one) {
    return isGoodbye(one.cause) && !known.contains(one.rank);
  });
}

}  // namespace

bool HeldReports::keep(const ViewReport& report, const JobRanks& known, Clock::time_point now) {
  const auto before = held_.find(report.from);
  if (!mustWait(report, known)) {
    if (before != held_.end()) held_.erase(before);
    return false;
  }
  if (before != held_.end()) {
    before->second.report = report;
  } else {
    held_.emplace(report.from, Held{report, now + limit_});
  }
  return true;
}

std::vector<ViewReport> HeldReports::take(const JobRanks& known, Clock::time_point now) {
  std::vector<ViewReport> taken;
  std::erase_if(held_, [&](auto& entry) {
    auto& [report, until] = entry.second;
    if (now < until && mustWait(report, known)) return false;
    taken.push_back(std::move(report));
    return true;
  });
  return taken;
}

std::optional<Clock::time_point> HeldReports::nextTick() const {
  std::optional<Clock::time_point> next;
  for (const auto& [from, held] : held_) next = next ? std::min(*next, held.until) : held.until;
  return next;
}

}  // namespace mooncake
