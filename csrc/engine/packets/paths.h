#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/deadline.h"

namespace mooncake {

// Which of our cards lead to one peer at the moment. Decides only: time comes in from outside.
//
// A path on which something fails, or on which something is under way and nothing comes to its end
// for the stall limit, is left out: nothing is sent there but probes, and it comes back when one is
// answered.
class Paths {
 public:
  static constexpr Clock::duration kLeastPause = std::chrono::milliseconds(2);  // between probes
  static constexpr Clock::duration kMostPause = std::chrono::milliseconds(500);

  explicit Paths(Clock::duration stallLimit) : stallLimit_(stallLimit) {}

  void reset(size_t count);
  size_t count() const { return paths_.size(); }

  // Of those that are up the one with the fewest under way: where cards or links are not equally
  // fast, the slower one gets less. Of several the first from this one on, around the corner.
  std::optional<size_t> choose(uint64_t from) const;
  bool isUp(size_t path) const { return paths_[path].isUp; }
  size_t up() const;
  // From when no path has been up, if none is.
  std::optional<Clock::time_point> allOutSince() const { return allOutSince_; }

  // Something is under way there, or not any more; `cameThrough`: it, or anything, has arrived.
  void began(size_t path, Clock::time_point now);
  void ended(size_t path, Clock::time_point now, bool cameThrough);

  // True: it was up.
  bool leaveOut(size_t path, Clock::time_point now);
  // Its card, or the peer's, was opened anew: what has been wrong there says nothing any more.
  bool startAnew(size_t path, Clock::time_point now);
  // Those that are up and have stalled.
  std::vector<size_t> stalled(Clock::time_point now) const;

  struct Probe {
    size_t path;
    uint64_t number;
  };
  // That are due; numbers are never 0.
  std::vector<Probe> probes(Clock::time_point now);
  // Of a path that may be up: its answer brings nothing back.
  uint64_t probe(size_t path) { return ++lastProbe_ * paths_.size() + path; }
  // The path of any probe of ours, answered or not. Not while there are none.
  size_t pathOf(uint64_t probe) const { return probe % paths_.size(); }
  // Which path comes back by it, if one does.
  std::optional<size_t> answered(uint64_t probe, Clock::time_point now);
  bool hasWork() const;

 private:
  struct Path {
    bool isUp = true;
    uint64_t underWay = 0;
    Clock::time_point progress;
    Clock::time_point nextProbe;
    Clock::duration pause = kLeastPause;
    uint64_t firstProbe = 0;  // that counts
  };
  const Clock::duration stallLimit_;
  std::vector<Path> paths_;
  std::optional<Clock::time_point> allOutSince_;
  uint64_t lastProbe_ = 0;
};

}  // namespace mooncake
