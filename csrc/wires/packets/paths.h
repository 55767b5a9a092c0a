#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/deadline.h"

namespace mooncake {

// The paths from our cards to one peer, one for each card, and which of them are up. Decides only:
// the time comes in from outside.
//
// A path is left out if a packet on it fails, or if it has packets in flight and none arrives for
// the stall limit. Only probes are sent over it then, and it is up again when one is answered.
//
// A path may also lose single packets, and later ones arrive. A packet is overtaken if the peer has
// acknowledged another one that left on the same path a quarter of the stall limit later.
class Paths {
 public:
  static constexpr Clock::duration kLeastPause = std::chrono::milliseconds(2);  // between probes
  static constexpr Clock::duration kMostPause = std::chrono::milliseconds(500);

  explicit Paths(Clock::duration stallLimit) : stallLimit_(stallLimit) {}

  void reset(size_t count);
  size_t count() const { return paths_.size(); }

  // Returns the path with the fewest packets in flight, of the paths that are up: a slower card or
  // link gets less. Of several equal ones the first from `from` on, cyclically. None: no path is
  // up.
  std::optional<size_t> choose(uint64_t from) const;
  bool isUp(size_t path) const { return paths_[path].isUp; }
  size_t up() const;
  // Returns since when no path has been up, if none is.
  std::optional<Clock::time_point> allOutSince() const { return allOutSince_; }

  // Count the packets in flight on a path. A packet ends when the peer has acknowledged it, or
  // when it does not count here any more.
  void began(size_t path, Clock::time_point now);
  void acknowledged(size_t path, Clock::time_point leftAt, Clock::time_point now);
  void dropped(size_t path);
  // Returns how long at least an overtaken packet has been in flight.
  Clock::duration overtakenAfter() const { return stallLimit_ / 4; }
  bool isOvertaken(size_t path, Clock::time_point leftAt) const {
    return leftAt + overtakenAfter() < paths_[path].newest;
  }

  // Returns whether the path was up.
  bool leaveOut(size_t path, Clock::time_point now);
  // The same, when one of its cards was opened anew: earlier failures count no more.
  bool startAnew(size_t path, Clock::time_point now);
  // Returns the paths that are up and have stalled.
  std::vector<size_t> stalled(Clock::time_point now) const;

  struct Probe {
    size_t path;
    uint64_t number;
  };
  // Returns the probes of paths that are left out that are due now. Their numbers are never 0.
  std::vector<Probe> probes(Clock::time_point now);
  // Returns the number of a probe for a path that may be up. Its answer brings no path back.
  uint64_t probe(size_t path) { return ++lastProbe_ * paths_.size() + path; }
  // Returns the path of a probe of ours. Not while there are no paths.
  size_t pathOf(uint64_t probe) const { return probe % paths_.size(); }
  // Takes the answer to a probe. Returns the path that is up again by it, if any.
  std::optional<size_t> answered(uint64_t probe, Clock::time_point now);
  bool hasWork() const;

 private:
  struct Path {
    bool isUp = true;
    uint64_t underWay = 0;
    Clock::time_point progress;
    Clock::time_point newest;  // when the newest acknowledged packet left
    Clock::time_point nextProbe;
    Clock::duration pause = kLeastPause;
    uint64_t firstProbe = 0;  // answers to earlier probes say nothing
  };
  const Clock::duration stallLimit_;
  std::vector<Path> paths_;
  std::optional<Clock::time_point> allOutSince_;
  uint64_t lastProbe_ = 0;
};

}  // namespace mooncake
