#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/remote.h"

// The memory that the kernels of a group of ranks share with each other and with their hosts.
// Plain data: a host fills it in before the first kernel.
namespace mooncake::kernels {

constexpr int kMaxRanks = 32;   // of a group
constexpr int kMaxBlocks = 16;  // of a kernel

// Time of a wait between two looks at memory of the host, each of which takes as long as a signal.
constexpr uint64_t kHostLookNs = 20'000;

// A word for each block and source in memory of the receiving rank, which only the source writes:
// the serial number of its exchange, and in the lower kCallBits a hash of its call. Serial numbers
// do not wrap: a word may stay as it is for as long as all calls have few blocks.
constexpr int kCallBits = 24;
struct Signals {
  uint64_t words[kMaxBlocks][kMaxRanks];
  // Where ranks are on several hosts: the last exchange of which the source has all data.
  uint64_t hasAll[kMaxRanks];
  // Not 0: other ranks go on without the receiving one. They write it before they overwrite data
  // that it may still read.
  uint32_t isOut;
};

// The bank of an exchange, in published memory and in inboxes.
MOONCAKE_HOST_DEVICE constexpr unsigned bankOf(uint64_t serial, unsigned banks) {
  return unsigned(banks == 2 ? serial % 2 : serial % 3);
}

// After a loss: the serial number that the next exchange follows, so that it has the bank after
// the bank of the exchange `last`. No exchange has had a higher one than `taken`.
constexpr uint64_t serialAfterLoss(uint64_t taken, uint64_t last, unsigned banks) {
  while (bankOf(taken, banks) != bankOf(last, banks)) ++taken;
  return taken;
}

// The host's decision about an operation that did not end by itself.
enum class Decision : uint32_t {
  kGoOn,   // without the ranks that are lost
  kTake,   // with all ranks, because another rank has ended it so: their data are all there
  kRefuse  // the group has ended: so do this operation and all later ones, without a result
};

// Which ranks take part in a group's operations, from one on.
struct Change {
  uint64_t lastOld;   // number of the last operation before it
  uint64_t lastCall;  // number of the last call before it; see HostWords::calls
  uint64_t active;    // bits of ranks
};

// Splits of an all_to_all that do not fit each other. The operation changes nothing.
constexpr uint32_t kMisfitPairs = 8;
struct Misfit {
  uint64_t call;   // its number; see HostWords::calls
  uint32_t count;  // of pairs, as far as there is room
  struct Pair {
    uint64_t sent, expected;  // bytes
    int from, to;
  } pairs[kMisfitPairs];
};
constexpr uint32_t kMostMisfits = 32;  // that the host has not taken

// Memory of the host that the device maps. Each word has one writer.
struct HostWords {
  // Written by the host. A kernel that waits stops once `stop` is another than the group's
  // generation. Then the host decides, and sets `decided` to that generation last.
  uint32_t stop = 0;
  uint32_t decided = 0;
  uint32_t decision = 0;
  uint64_t active = 0;  // bits of the ranks that go on
  uint64_t serial = 0;  // the next exchange has the serial number after this one
  // In operation `partial` only the ranks `among` take part: the other ranks were late. This rank
  // takes no part in its operations up to number `skipped`.
  uint64_t partial = 0;
  uint64_t among = 0;
  uint64_t skipped = 0;
  uint32_t misfitsTaken = 0;

  // Written by kernels. `stopped` is the generation at which a kernel has stopped, written last.
  uint32_t stopped = 0;
  uint64_t stoppedAt = 0;  // number of the operation that has stopped; `done`: between two
  uint64_t done = 0;       // number of the last operation that has ended
  uint64_t calls = 0;      // number of them that a call launched, and no graph
  uint64_t parked = 0;     // number of a graph's operation in which a rank was late
  uint64_t missing = 0;    // bits of the ranks that the stopped operation waits for
  uint64_t ended = 0;   // serial number of the last exchange of the last operation that has ended
  uint64_t taken = 0;   // no exchange of this rank has a higher serial number
  uint64_t hadAll = 0;  // see GroupState; 0: ranks read no inboxes but their own
  // Number of the last operation that waits for ranks but may skip late ones, after so long.
  uint64_t waits = 0;
  uint64_t skipNs = 0;
  uint32_t failed = 0;  // a Failure
  uint32_t failedRank = 0;
  // The decisions by which ranks went out, in their order. `changeCount` is written last. Each takes
  // out one rank at least, and none comes back to a group: so there are fewer than ranks.
  uint32_t changeCount = 0;
  Change changes[kMaxRanks] = {};
  // A ring. `misfitCount` is written last.
  uint32_t misfitCount = 0;
  Misfit misfits[kMostMisfits] = {};
};

// The bit of GroupState::entered that holds up blocks at their begin.
constexpr uint32_t kHeld = 1u << 31;

enum class Failure : uint32_t {
  kNone,
  kMismatch,   // failedRank has called another operation
  kUndecided,  // the host did not decide in time
  kRefused,
  kUnreceived,  // an operation was sent before the one ahead of it had been received
  kOut,         // other ranks have gone on without this one
  kSplits,      // splits of a replayed all_to_all do not fit, or too many misfits are not taken
  // failedRank has given wrong inputs; see kernels/ep.
  kNoSuchExpert,
  kTooManyRows,
  kOtherExpert,
  kOtherDispatch,
  kNoPlace,
};

// Memory of the rank's own device. Kernels of a group run one after the other on it, so only the
// blocks of one kernel share its words. `entered` keeps acknowledge() from running beside
// kernels on other streams.
struct GroupState {
  int rank = 0;
  int ranks = 0;
  uint64_t active = 0;   // bits of the ranks that take part
  uint64_t partial = 0;  // this and the next two: see HostWords
  uint64_t among = 0;
  uint64_t skipped = 0;
  uint32_t generation = 0;  // counts the host's decisions
  uint64_t done = 0;        // number of the last operation that has ended
  uint64_t serial = 0;      // of the last exchange. An operation has one or more
  uint64_t hadAll = 0;      // of the last exchange of which this rank has told that it has all data
  uint64_t calls = 0;       // see HostWords
  uint64_t sent = 0;        // serial number of the last exchange that sendAll() began
  uint32_t sentBlocks = 0;  // its blocks, as far as `entered` counts them
  uint32_t failed = 0;      // a Failure: later operations do nothing
  uint32_t arrived = 0;     // blocks that have ended their part, and from bit 16 on stopped ones
  uint32_t entered = 0;     // blocks with Exchange::isHeld that have begun, or kHeld
  // Exchanges that a block has ended, and exchanges that it has published, when it leaves.
  uint32_t progress[kMaxBlocks] = {};
  uint32_t publishedExchanges[kMaxBlocks] = {};

  uint64_t patienceNs = 0;  // a kernel that waits for so long stops by itself
  uint64_t decisionNs = 0;  // between two operations, the host decides within this time

  // Of each rank, at this device's addresses: banks of `bankBytes`, which exchanges use in turn.
  unsigned banks = kMostBanks;  // 2: no exchange is published ahead
  size_t bankBytes = 0;
  unsigned char* data[kMaxRanks] = {};
  Signals* signals[kMaxRanks] = {};
  HostWords* host = nullptr;

  // Ranks on other hosts. `data` and `signals` of theirs are null.
  Remote remote = {};
};
static_assert(kMaxRanks == kMaxRemoteRanks && kMaxBlocks == kMaxRemoteBlocks);

}  // namespace mooncake::kernels
