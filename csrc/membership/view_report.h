#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "membership/rank_set.h"
#include "membership/term.h"

namespace mooncake {

// Reasons to count a rank as out. Three are certain, the other reasons are suspicions.
enum class Cause : uint8_t {
  kExited = 1,       // certain: the kernel of its host said so
  kLeft = 2,         // certain: it said goodbye; never an accusation
  kSilent = 3,       // nothing was heard from it for failure_timeout
  kRefused = 4,      // it refused a connection, and no rank on its host could testify
  kExcludes = 5,     // its own report excludes the accuser
  kUnreachable = 6,  // its connection broke and could not be made again, for an unknown reason
  kEnded = 7,        // certain: like kLeft, but its program ended without destroying the job
  kSuspects = 8,     // a candidate that suspects members
  kSeatTaken = 9,    // a candidate for a rank that another process gets
};

inline bool isGoodbye(Cause cause) { return cause == Cause::kLeft || cause == Cause::kEnded; }
inline bool isCertain(Cause cause) { return cause == Cause::kExited || isGoodbye(cause); }

struct Accusation {
  int rank = 0;
  Cause cause = Cause::kExited;
  int by = 0;  // the first rank that saw it, as far as we know

  bool operator==(const Accusation&) const = default;
};

// A candidate, as a report has it.
struct Join {
  enum class State : uint8_t { kLive, kSuspected, kGone, kSettled };

  int rank = 0;  // the rank that it asks for
  EngineId id{};
  State state = State::kLive;
  Cause cause = Cause::kExited;  // unless it is live, as in an Accusation
  int by = 0;

  bool operator==(const Join&) const = default;
};

// How a term was closed, and the next one began.
struct Close {
  struct Newcomer {
    int rank = 0;
    EngineId id{};
    bool isOut = false;  // it was out by then, and is no rank of the next term

    bool operator==(const Newcomer&) const = default;
  };

  uint32_t digest = 0;              // of the closed term
  std::vector<Accusation> out;      // ranks that are not in the next term, ascending
  std::vector<Newcomer> newcomers;  // by rank, then by id; not empty

  JobRanks outRanks() const;
  bool operator==(const Close&) const = default;
};

// The whole state of a rank. Its sets only grow (a suspicion may become certain), so a report
// includes all earlier ones of the same rank: losing, repeating and reordering them does no harm.
// The sets are ranks of the sender's term. What its rank reported in earlier terms is part of them,
// but for ranks that are not in this term any more.
struct ViewReport {
  static constexpr size_t kMostJoins = 64;

  int from = 0;
  JobRanks committed;  // out of the sender's last view
  JobRanks gone;       // certainly out
  JobRanks settled;    // gone, and all ranks that its last report excludes are out here, too
  JobRanks suspected;  // out, but not certainly
  std::vector<Accusation> accusations;  // one for each rank that is out, by rank

  // The rest is as here while the job has had no candidates.
  bool isCandidate = false;  // the sender asks to be rank `from`
  TermId term;
  uint64_t epoch = 0;          // of the view with which the term began; 0 in the first term
  std::optional<Close> close;  // of the term before
  std::vector<Join> joins;     // candidates that it knows, by rank, then by id

  JobRanks out() const { return gone | suspected; }
  bool operator==(const ViewReport&) const = default;
};

Bytes encodeViewReport(const ViewReport& report);
// kProtocol: the report is inconsistent in a job of `ranks` ranks.
Result<ViewReport> decodeViewReport(ByteView bytes, int ranks);

}  // namespace mooncake
