#include "backend/rank_evidence.h"

#include <algorithm>

namespace mooncake {
namespace {

// Name of the way in which a rank ended: our own evidence if it is certain, else the cause that the
// job's view has.
const char* kindOf(const Evidence* seen, const Membership::Seen* accused) {
  const auto kind = seen ? seen->kind : Evidence::Kind::kUnreachable;
  const bool isCertain = kind == Evidence::Kind::kGoodbye || kind == Evidence::Kind::kEnded ||
                         kind == Evidence::Kind::kFailed || kind == Evidence::Kind::kExited;
  if (isCertain || !accused) return evidenceKindName(seen->kind);
  switch (accused->accusation.cause) {
    case Cause::kExited:
      return "exited";
    case Cause::kLeft:
      return "goodbye";
    case Cause::kEnded:
      return "ended";
    case Cause::kSilent:
      return "silent";
    case Cause::kRefused:
      return "refused";
    case Cause::kUnreachable:
      return "unreachable";
    case Cause::kExcludes:
    case Cause::kSeatTaken:
      return "excludes";
  }
  return "?";
}

}  // namespace

std::vector<RankEvidence> evidenceIn(const Group& group, const std::function<int(int)>& jobRank) {
  std::vector<RankEvidence> all;
  const auto accused = group.membership()->seen();
  const auto systemNow = std::chrono::system_clock::now();
  const auto steadyNow = Clock::now();
  for (int r = 0; r < group.size(); ++r) {
    const Evidence* seen = group.window().disconnection(r);
    const auto found = std::ranges::find(
        accused, jobRank(r), [](const Membership::Seen& one) { return one.accusation.rank; });
    const Membership::Seen* known = found == accused.end() ? nullptr : &*found;
    if (!seen && !known) continue;
    RankEvidence one{.rank = r, .kind = kindOf(seen, known)};
    if (seen) {
      one.detail = seen->detail;
      one.when = seen->when;
    } else {
      one.detail = known->detail.empty()
                       ? "rank " + std::to_string(known->accusation.by) + " says so"
                       : known->detail;
      one.when = steadyNow - std::chrono::duration_cast<Clock::duration>(systemNow - known->when);
    }
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace mooncake
