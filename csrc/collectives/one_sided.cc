#include "collectives/one_sided.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "group/fetches.h"

namespace mooncake {

Result<uint32_t> OneSided::open(std::span<std::byte> memory) {
  if (last_ == std::numeric_limits<uint32_t>::max())
    return Error{ErrorCode::kExhausted, "2^32 windows were opened in this group: make another one"};
  Exposed& window = windows_[++last_];
  window.memory = memory;
  window.sources.resize(size_t(group_->size()));
  return last_;
}

void OneSided::move(Group& successor, const std::vector<bool>& stays) {
  for (auto& [id, window] : windows_) {
    for (size_t from = 0; from < window.sources.size(); ++from) {
      Source& source = window.sources[from];
      // The successor's window cannot cancel a fetch from a rank that is not in it.
      if (!stays[from] || (source.fetch && !successor.window().peer(int(from)))) forget(source);
      if (stays[from]) continue;
      source = {};
      source.isMember = false;
    }
  }
  group_ = &successor;
}

bool OneSided::hasJoinedAfter(uint32_t window, int rank) const {
  const auto found = windows_.find(window);
  return found != windows_.end() && !found->second.sources[size_t(rank)].isMember &&
         !group_->isGone(rank);
}

void OneSided::close(uint32_t window) {
  const auto found = windows_.find(window);
  if (found == windows_.end()) return;
  for (int from = 0; from < group_->size(); ++from) {
    Source& source = found->second.sources[from];
    const std::deque<Arrival> waiting = std::move(source.waiting);
    forget(source);
    for (const Arrival& arrival : waiting) release(from, arrival);
  }
  windows_.erase(found);
}

void OneSided::closeAll() {
  while (any()) close(windows_.begin()->first);
}

bool OneSided::take(int from, Arrival arrival) {
  const auto found = windows_.find(arrival.window);
  // The window was closed here but not at the source, as happens when its Python object goes. The
  // source does not learn of that, but gets its memory back.
  if (found == windows_.end()) {
    release(from, arrival);
    return true;
  }
  Exposed& window = found->second;
  const size_t size = window.memory.size();
  if (arrival.offset > size || arrival.bytes > size - arrival.offset) return false;
  Source& source = window.sources[from];
  source.heldBytes += arrival.heldBytes();
  source.waiting.push_back(std::move(arrival));
  if (source.waiting.size() == 1) advance(window, from);  // else the first one is under way
  return true;
}

void OneSided::putHere(uint32_t window, uint64_t offset, std::span<const std::byte> data) {
  // The data may be a part of the window.
  if (!data.empty())
    std::memmove(windows_.at(window).memory.data() + offset, data.data(), data.size());
}

void OneSided::signalHere(uint32_t window) {
  ++windows_.at(window).sources[group_->rank()].signals;
}

void OneSided::progress() {
  for (auto& [id, window] : windows_) {
    for (int from = 0; from < group_->size(); ++from) advance(window, from);
  }
}

void OneSided::advance(Exposed& window, int from) {
  Source& source = window.sources[from];
  while (!source.waiting.empty()) {
    if (source.waiting.front().isLarge()) {
      const Fetched fetched = fetch(window, from);
      if (fetched == Fetched::kNotYet) return;
      if (fetched == Fetched::kNever) return forget(source);
    }
    apply(window, from, source.waiting.front());
    source.heldBytes -= source.waiting.front().heldBytes();
    source.waiting.pop_front();
  }
}

// Fetches the data of the source's first arrival. kNever: no data comes from this rank any more.
OneSided::Fetched OneSided::fetch(Exposed& window, int from) {
  Source& source = window.sources[from];
  if (!source.fetch) start(window, from);
  if (!source.fetch->finished()) return group_->isGone(from) ? Fetched::kNever : Fetched::kNotYet;
  switch (const ErrorCode code = source.fetch->error.load(std::memory_order_acquire)) {
    case ErrorCode::kOk:
    case ErrorCode::kRefused:  // the source gave it up: its put has raised, and the content
                               // of the target is undefined
      source.fetch.reset();
      return Fetched::kDone;
    case ErrorCode::kPeerLost:
      if (group_->isGone(from)) return Fetched::kNever;
      // The connection broke. It may have been made again since the fetch began.
      if (reconnections_[from] != source.reconnections) start(window, from);
      return Fetched::kNotYet;
    case ErrorCode::kAborted:  // the source goes on without us; the membership will tell us so
      return Fetched::kNever;
    default:
      // To go on without the data would break the promise of a signal.
      if (!group_->isGone(from))
        group_->fail({code, "fetching a put of " + group_->nameRank(from) + " failed (" +
                                errorCodeName(code) + ")"});
      return Fetched::kNever;
  }
}

void OneSided::start(Exposed& window, int from) {
  Source& source = window.sources[from];
  const Arrival& put = source.waiting.front();
  source.reconnections = reconnections_[from];
  source.fetch = std::make_unique<Completion>(&group_->window().bell());
  const Status started = group_->window().get(
      from, put.region, 0, window.memory.subspan(put.offset, put.bytes), *source.fetch);
  if (!started.ok()) source.fetch->error.store(started.code());
}

void OneSided::apply(Exposed& window, int from, const Arrival& arrival) {
  Source& source = window.sources[from];
  ++source.applied;
  if (arrival.kind == CellKind::kSignal) {
    ++source.signals;
  } else if (arrival.isLarge()) {
    acknowledge_(from, arrival.number);
  } else if (arrival.bytes) {
    std::memcpy(window.memory.data() + arrival.offset, arrival.payload.data(), arrival.bytes);
  }
}

// Gives the source's memory back for an arrival that is not applied.
void OneSided::release(int from, const Arrival& arrival) {
  if (arrival.isLarge()) acknowledge_(from, arrival.number);
}

void OneSided::forget(Source& source) {
  if (source.fetch) group_->window().cancel(*source.fetch);
  source.fetch.reset();
  source.waiting.clear();
  source.heldBytes = 0;
}

bool OneSided::takeSignal(uint32_t window, int from) {
  uint64_t& signals = windows_.at(window).sources[from].signals;
  if (signals == 0) return false;
  --signals;
  return true;
}

uint64_t OneSided::applied(uint32_t window, int from) const {
  return windows_.at(window).sources[from].applied;
}

size_t OneSided::heldBytes(int from) const {
  size_t bytes = 0;
  for (const auto& [id, window] : windows_) bytes += window.sources[from].heldBytes;
  return bytes;
}

bool OneSided::holdsBack(int from) const {
  return std::ranges::any_of(
      windows_, [&](const auto& one) { return !one.second.sources[from].waiting.empty(); });
}

}  // namespace mooncake
