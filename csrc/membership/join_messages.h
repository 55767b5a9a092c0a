#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "membership/join_options.h"
#include "membership/term.h"
#include "membership/view.h"

// Messages between a candidate and the members of a job, on kJoinTopic. The term's close, by which a
// candidate becomes a rank, is in the reports about the view (view_report.h).
namespace mooncake {

inline constexpr uint64_t kJoinTopic = 4;

// JOIN: a candidate asks a member for the roster. CONNECTED: it tells each member that it has
// connections to all ranks of a view.
struct JoinRequest {
  static constexpr size_t kMostHost = 255;
  static constexpr size_t kMostEndpoint = 8192;

  JobIdentity identity;
  int rank = 0;
  int size = 0;
  uint32_t process = 0;  // its pid, for the log
  std::string host;      // for the log
  Bytes endpoint;        // at which it listens
  struct Connected {
    TermId term;
    uint64_t epoch = 0;  // of the view

    bool operator==(const Connected&) const = default;
  };
  std::optional<Connected> connected;  // null: JOIN

  bool operator==(const JoinRequest&) const = default;
};

// REFUSED.
struct JoinRefusal {
  enum class Reason : uint8_t {
    kVersion = 1,  // another version of these messages
    kJob,          // another job
    kMode,         // another mode
    kOptions,      // other options
    kSize,         // the job has no room for as many ranks
    kRange,        // no rank of the job
    kOlder,        // this process was a rank or a candidate, and is out
    kHeld,         // a living process holds the rank, or the job has not agreed yet that it is out
    kAsked,        // another candidate asks for the rank
    kBusy,         // too many candidates at a time
    kOver,         // the member is out of the job itself
    kClosed,       // the job lets no process in
  };
  static constexpr size_t kMostText = 1024;

  Reason reason = Reason::kVersion;
  std::string text;

  // Returns whether the same request may be taken later.
  bool isForNow() const;
  bool operator==(const JoinRefusal&) const = default;
};

// ROSTER: a part of a term and of a view in it.
struct RosterPart {
  struct Seat {
    Holder holder;
    bool isActive = false;
    Bytes endpoint;  // of an active rank

    bool operator==(const Seat&) const = default;
  };

  uint32_t number = 0;  // of the term
  uint64_t epoch = 0;   // with which the term began
  uint64_t viewEpoch = 0;
  int size = 0;
  int first = 0;                           // rank of the first seat
  std::vector<std::optional<Seat>> seats;  // null: the rank is empty

  bool operator==(const RosterPart&) const = default;
};

// MEET: a member tells a candidate of another one, so that they connect to each other, and each then
// tells the other of itself.
struct JoinMeeting {
  int rank = 0;  // that this candidate asks for
  Bytes endpoint;

  bool operator==(const JoinMeeting&) const = default;
};

using JoinMessage = std::variant<JoinRequest, JoinRefusal, RosterPart, JoinMeeting>;

Bytes encodeJoinMessage(const JoinMessage& message);
// kMismatch: another version. kProtocol: it does not make sense.
Result<JoinMessage> decodeJoinMessage(ByteView bytes);

// The parts of a roster, each of which fits into a message. `endpoints`: by rank.
std::vector<RosterPart> splitRoster(const Term& term, const View& view,
                                    const std::vector<Bytes>& endpoints);

}  // namespace mooncake
