#include "wires/packets/paths.h"

#include <algorithm>

namespace mooncake {

void Paths::reset(size_t count) {
  paths_.assign(count, Path());
  allOutSince_.reset();
}

std::optional<size_t> Paths::choose(uint64_t from) const {
  std::optional<size_t> best;
  for (size_t i = 0; i < paths_.size(); ++i) {
    const size_t path = (from + i) % paths_.size();
    if (paths_[path].isUp && (!best || paths_[path].underWay < paths_[*best].underWay)) best = path;
  }
  return best;
}

size_t Paths::up() const {
  return static_cast<size_t>(
      std::count_if(paths_.begin(), paths_.end(), [](const Path& path) { return path.isUp; }));
}

void Paths::began(size_t index, Clock::time_point now) {
  Path& path = paths_[index];
  if (path.underWay++ == 0) path.progress = now;
}

void Paths::acknowledged(size_t index, Clock::time_point leftAt, Clock::time_point now) {
  dropped(index);
  Path& path = paths_[index];
  path.progress = now;
  path.newest = std::max(path.newest, leftAt);
}

void Paths::dropped(size_t index) {
  if (paths_[index].underWay > 0) --paths_[index].underWay;
}

bool Paths::leaveOut(size_t index, Clock::time_point now) {
  Path& path = paths_[index];
  if (!path.isUp) return false;
  path.isUp = false;
  path.nextProbe = now;
  // A path that comes and goes is probed less and less.
  path.pause = std::clamp<Clock::duration>(2 * path.pause, kLeastPause, kMostPause);
  path.firstProbe = lastProbe_ + 1;
  if (up() == 0) allOutSince_ = now;
  return true;
}

bool Paths::startAnew(size_t index, Clock::time_point now) {
  const bool wasUp = leaveOut(index, now);
  paths_[index].pause = kLeastPause;
  paths_[index].nextProbe = now;
  return wasUp;
}

std::vector<size_t> Paths::stalled(Clock::time_point now) const {
  std::vector<size_t> found;
  for (size_t i = 0; i < paths_.size(); ++i) {
    const Path& path = paths_[i];
    if (path.isUp && path.underWay > 0 && now - path.progress > stallLimit_) found.push_back(i);
  }
  return found;
}

std::vector<Paths::Probe> Paths::probes(Clock::time_point now) {
  std::vector<Probe> due;
  for (size_t i = 0; i < paths_.size(); ++i) {
    Path& path = paths_[i];
    if (path.isUp || now < path.nextProbe) continue;
    path.nextProbe = now + path.pause;
    path.pause = std::min(2 * path.pause, kMostPause);
    ++lastProbe_;
    due.push_back({i, lastProbe_ * paths_.size() + i});
  }
  return due;
}

std::optional<size_t> Paths::answered(uint64_t probe, Clock::time_point now) {
  if (paths_.empty()) return std::nullopt;
  const size_t index = probe % paths_.size();
  Path& path = paths_[index];
  // An answer to a probe from before the path was left out says nothing.
  if (path.isUp || probe / paths_.size() < path.firstProbe) return std::nullopt;
  path.isUp = true;
  path.progress = now;
  allOutSince_.reset();
  return index;
}

bool Paths::hasWork() const {
  return std::any_of(paths_.begin(), paths_.end(),
                     [](const Path& path) { return !path.isUp || path.underWay > 0; });
}

}  // namespace mooncake
