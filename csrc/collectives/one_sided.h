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

// A put or a signal that came out of a rank's mailbox.
struct Arrival {
  CellKind kind;
  uint32_t window;
  uint64_t number;  // number of the message
  uint64_t bytes;   // more than kCellPayload: to be fetched
  uint64_t offset;
  RemoteRegion region;
  std::vector<std::byte> payload;

  bool isLarge() const { return bytes > kCellPayload; }
  size_t heldBytes() const { return sizeof(Arrival) + payload.size(); }
};

// The receiving side of put and signal: this rank's windows, and the arrivals for them.
//
// Only the process that owns a window writes to its memory. A rank may be stopped in the middle of
// a put and resume long after the other ranks have gone on without it. It must not write to memory
// that has another use by then. So a put says which data goes where, and the owner fetches the data
// of a large put, as it does for a large message.
//
// Arrivals from one rank for one window are applied in the order of the calls. A rank's signal
// means that all data that this rank put before it is in place.
//
// The caller serializes the calls (PointToPoint's lock).
class OneSided {
 public:
  using Acknowledge = std::function<void(int to, uint64_t number)>;
  OneSided(Group& group, Acknowledge acknowledge)
      : group_(&group), acknowledge_(std::move(acknowledge)) {}
  // Goes on with the successor. `stays[r]`: rank r is the same process in both groups. Arrivals of
  // the other ranks are dropped.
  void move(Group& successor, const std::vector<bool>& stays);

  // Opens a window: the other ranks may put into this memory under the returned number. No number
  // is used twice.
  Result<uint32_t> open(std::span<std::byte> memory);
  // On return the window's memory is not written any more. Later arrivals for it are dropped.
  void close(uint32_t window);
  // Closes all windows. Afterwards this object does not touch the group any more.
  void closeAll();
  bool isOpen(uint32_t window) const { return windows_.contains(window); }
  // Returns whether a process has the rank that came after our window was opened: it has no part.
  bool hasJoinedAfter(uint32_t window, int rank) const;
  bool any() const { return !windows_.empty(); }

  // Takes in an arrival. False: its range lies outside the window.
  bool take(int from, Arrival arrival);
  // Calls of this rank to itself. The window must be open and contain the range.
  void putHere(uint32_t window, uint64_t offset, std::span<const std::byte> data);
  void signalHere(uint32_t window);
  // Applies arrivals when their data has been fetched.
  void progress();
  // A fetch that broke with the connection starts again.
  void onReconnected(int rank) { ++reconnections_[rank]; }

  // Takes one signal of the rank, if one is there.
  bool takeSignal(uint32_t window, int from);
  // Number of puts and signals of the rank that have been applied.
  uint64_t applied(uint32_t window, int from) const;
  // Bytes of arrivals that wait for fetches of the rank's earlier puts.
  size_t heldBytes(int from) const;
  bool holdsBack(int from) const;

 private:
  struct Source {
    std::deque<Arrival> waiting;  // in order; the first one is being fetched
    size_t heldBytes = 0;         // bytes of `waiting`
    std::unique_ptr<Completion> fetch;
    uint64_t reconnections = 0;  // reconnections_ of the rank when the fetch began
    uint64_t applied = 0;
    uint64_t signals = 0;  // the part of `applied` that no wait has taken yet
    bool isMember = true;  // the process was there when the window was opened
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

  Group* group_;
  const Acknowledge acknowledge_;
  std::map<uint32_t, Exposed> windows_;
  std::map<int, uint64_t> reconnections_;
  uint32_t last_ = 0;  // number of the last window
};

}  // namespace mooncake
