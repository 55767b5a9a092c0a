#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "engine/contract/transport.h"

namespace mooncake {

// A process that a series has and the one before has not.
struct Newcomer {
  int rank = 0;  // in the group
  EngineId id{};

  bool operator==(const Newcomer&) const = default;
};

// The next series of a line, as the members name it to each other.
struct Successor {
  uint32_t series = 0;  // number; a line's first one has 1
  // The rank that has proposed it, and which of that rank's proposals it is. A successor that a
  // member has given up is never made again: a later proposal of the same newcomers has another number.
  int proposer = 0;
  uint32_t number = 0;
  // Its members: the newcomers, and the processes that are ranks of the job since this term or
  // before it, but for these. The job may have further processes, which are not ready yet, or were
  // taken out.
  uint32_t term = 0;
  std::vector<int> absent;          // in order
  std::vector<Newcomer> newcomers;  // by rank
  uint32_t extent = 0;              // number of ranks that programs see
  std::vector<int> retired;         // in order: ranks that were taken out and are not back
  // By rank of the group, all of them: ranks of the job. Roster::kNobody: none has come yet. Also of
  // kReady: as the newcomer was told.
  std::vector<int> jobRanks;

  bool operator==(const Successor&) const = default;
  bool hasNewcomerFor(int rank) const;
  bool isWithout(int rank) const;  // it is among the absent ones
  // A name for hashing: lines and successors that differ have different ones.
  std::string identity(const std::string& line) const;
};

// What the members of a line and newcomers tell each other. The sender is known by its engine.
struct LineMessage {
  enum class Kind : uint8_t {
    kReady = 1,  // a newcomer: it waits to be let in
    kAsk,        // to the member that proposes: the newcomers of `successor` are to be let in, and
                 // members that are among its `absent` ones are to be taken out
    kPrepare,    // make `successor`; with `wishes`, also move to it
    kGaveUp,     // the sender never moves to `successor`
    kMoved,      // to a newcomer: the sender is in `successor`
  };
  Kind kind = Kind::kReady;
  bool wishes = false;
  Successor successor;

  bool operator==(const LineMessage&) const = default;
};

Bytes encodeLineMessage(const LineMessage& message);
// kProtocol: it does not decode, or has a rank outside of a group of `size`.
Result<LineMessage> decodeLineMessage(ByteView bytes, int size);

}  // namespace mooncake
