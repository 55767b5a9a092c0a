#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "collectives/mailbox.h"
#include "group/group.h"

namespace mooncake {

// A put or a signal, as it came out of a rank's mailbox.
struct Arrival {
  CellKind kind;
  uint32_t window;
  uint64_t number;  // of the message
  uint64_t bytes;   // more than kCellPayload: to be fetched
  uint64_t offset;
  RemoteRegion region;
  std::vector<std::byte> payload;

  bool isLarge() const { return bytes > kCellPayload; }
  size_t heldBytes() const { return sizeof(Arrival) + payload.size(); }
};

// The receiving side of put and signal: this rank's windows, and what the others have put into
// them.
//
// Whoever owns memory writes it. A rank that was stopped in the middle of a put, and is let go on
// when the others have long gone on without it, must not write into memory that serves something
// else by then; so nobody writes into a program's memory but its own process. A put says what goes
// where; a large one is fetched from the source, as a large message is.
//
// What comes from one rank for one window is applied in the order of the calls: whoever has a
// rank's signal has the data of all that this rank put before it.
//
// The caller keeps calls apart (PointToPoint's turn).
class OneSided {
 public:
  using Acknowledge = std::function<void(int to, uint64_t number)>;
  OneSided(Group& group, Acknowledge acknowledge)
      : group_(group), acknowledge_(std::move(acknowledge)) {}

  // From now on the other ranks may put into this memory, under the number that this returns. No
  // number is used twice.
  Result<uint32_t> open(std::span<std::byte> memory);
  // Nothing is written into its memory any more when this returns. What comes for it afterwards is
  // dropped.
  void close(uint32_t window);
  // Nothing of the group is touched any more afterwards.
  void closeAll();
  bool isOpen(uint32_t window) const { return windows_.contains(window); }
  bool any() const { return !windows_.empty(); }

  // False: what it says cannot be.
  bool take(int from, Arrival arrival);
  // Of this rank itself. The range lies within the window, which is open.
  void putHere(uint32_t window, uint64_t offset, std::span<const std::byte> data);
  void signalHere(uint32_t window);
  // Applies what has been fetched.
  void progress();
  // A fetch that broke with the connection is begun again.
  void onReconnected(int rank) { ++reconnections_[rank]; }

  // Takes one signal of the rank, if one is there.
  bool takeSignal(uint32_t window, int from);
  // How many puts and signals of the rank have been applied.
  uint64_t applied(uint32_t window, int from) const;
  // What waits here for fetches of the rank's earlier puts.
  size_t heldBytes(int from) const;
  bool holdsBack(int from) const;

 private:
  struct Source {
    std::deque<Arrival> waiting;  // in order; the first one is being fetched
    size_t heldBytes = 0;         // of `waiting`
    std::unique_ptr<Completion> fetch;
    uint64_t reconnections = 0;  // of the connection, when the fetch began
    uint64_t applied = 0;
    uint64_t signals = 0;  // of `applied`, that nobody has taken yet
  };
  struct Exposed {
    std::span<std::byte> memory;
    std::vector<Source> sources;  // by rank
  };

  void advance(Exposed& window, int from);
  enum class Fetched { kNotYet, kDone, kNever };
  Fetched fetch(Exposed& window, int from);
  void start(Exposed& window, int from);
  void apply(Exposed& window, int from, const Arrival& arrival);
  void release(int from, const Arrival& arrival);
  void forget(Source& source);

  Group& group_;
  const Acknowledge acknowledge_;
  std::map<uint32_t, Exposed> windows_;
  std::map<int, uint64_t> reconnections_;
  uint32_t last_ = 0;  // number of a window
};

}  // namespace mooncake
