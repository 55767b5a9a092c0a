#include "wires/tcp/tcp_channel.h"

#include <algorithm>
#include <array>

#include "base/backoff.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "wires/tcp/socket.h"

namespace mooncake {
namespace {

// Bounds of the pause between two requests for data lanes. The pause doubles if a lane cannot be
// made, or breaks before kLongLife has passed.
constexpr Clock::duration kLeastPause = std::chrono::milliseconds(10);
constexpr Clock::duration kMostPause = std::chrono::seconds(30);
constexpr Clock::duration kLongLife = std::chrono::seconds(10);
// Least bytes of a list for one lane, and the cost of a transfer in addition to its bytes.
constexpr size_t kLeastShare = size_t(64) << 10;
constexpr size_t kLeastCost = 1024;
// Time between two checks whether the transfers on a retired lane have ended.
constexpr auto kDraining = std::chrono::milliseconds(100);

std::span<std::byte> memoryOf(const GetRequest& request) { return request.target; }
std::span<const std::byte> memoryOf(const WriteRequest& request) { return request.source; }

void cutTo(GetRequest& request, size_t at, size_t length) {
  request.target = request.target.subspan(at, length);
}
void cutTo(WriteRequest& request, size_t at, size_t length) {
  request.source = request.source.subspan(at, length);
}

Status begin(StreamConnection& lane, std::span<const GetRequest> some) { return lane.get(some); }
Status begin(StreamConnection& lane, std::span<const WriteRequest> some) {
  return lane.write(some);
}
StreamConnection* leastLoaded(std::span<StreamConnection* const> lanes) {
  return *std::min_element(lanes.begin(), lanes.end(), [](const auto* a, const auto* b) {
    return a->unansweredBytes() < b->unansweredBytes();
  });
}

template <typename Request>
void endAtOnce(const Request& request, const Status& how) {
  request.completion->begin();
  request.completion->end(how.code());
}

}  // namespace

std::shared_ptr<TcpChannel> TcpChannel::start(const TransportContext& context, Fd firstLane,
                                              Options options) {
  std::shared_ptr<TcpChannel> channel(new TcpChannel(context, std::move(options)));
  // The lane may end before it is stored here: laneEnded() waits for the lock.
  Lock lock(channel->mutex_);
  channel->attempt_ = channel->options_.attempt;
  channel->pause_ = kLeastPause.count();
  channel->startLane(kPutLane, std::move(firstLane));
  return channel;
}

void TcpChannel::startLane(size_t index, Fd socket) {
  Lane& lane = lanes_[index];
  keepQueueShort(socket.get());
  if (context_.deadAfter.count() > 0) breakWhenDead(socket.get(), context_.deadAfter);
  lane.life.fetch_add(1, std::memory_order_relaxed);
  if (lane.connection) {
    lane.connection->reconnect(std::move(socket));
  } else {
    const auto& loops = context_.dataLoops;
    // Peers start at different loops.
    const size_t first = static_cast<size_t>(options_.peer[0]);
    EventLoop& loop =
        index == kPutLane || loops.empty() ? context_.loop : *loops[(first + index) % loops.size()];
    lane.connection =
        StreamConnection::start(std::move(socket), loop, context_.regions, eventsOf(index));
    if (fenced_) lane.connection->fence();
    lane.made.store(lane.connection.get(), std::memory_order_release);
  }
  lane.stands.store(true, std::memory_order_release);
}

// Events of a data lane come on its own loop and are passed to the engine's loop.
StreamConnection::Events TcpChannel::eventsOf(size_t index) {
  const std::weak_ptr<TcpChannel> weak = weak_from_this();
  if (index == kPutLane) {
    return {.onMessage = [peer = options_.peer, &context = context_](
                             ByteView message) { context.onMessage(peer, message); },
            .onClosed =
                [weak, index](const Status& how) {
                  if (const auto alive = weak.lock())
                    alive->laneEnded(index, alive->lanes_[index].life, how);
                },
            .onLanesWanted =
                [weak] {
                  const auto alive = weak.lock();
                  if (alive && alive->options_.makeLanes) alive->wantLanes();
                },
            .onPull = nullptr,
            .onRetired = nullptr};
  }
  return {.onMessage = [](ByteView) {},  // peers send messages on lane 0 only
          .onClosed =
              [weak, index, &context = context_](const Status& how) {
                const auto alive = weak.lock();
                if (!alive) return;
                // The lane is not made again before this returns.
                const uint64_t life = alive->lanes_[index].life;
                if (context.loop.onLoopThread()) return alive->laneEnded(index, life, how);
                context.loop.post([weak, index, life, how] {
                  if (const auto alive = weak.lock()) alive->laneEnded(index, life, how);
                });
              },
          .onLanesWanted = nullptr,
          .onPull = nullptr,
          .onRetired =
              [weak, index, &context = context_] {
                const auto alive = weak.lock();
                if (!alive) return;
                context.loop.post([weak, index, life = alive->lanes_[index].life.load()] {
                  if (const auto alive = weak.lock()) alive->laneRetired(index, life);
                });
              }};
}

// Returns the data lanes that stand. Asks for more if this many bytes make them pay.
size_t TcpChannel::dataLanes(DataLanes& lanes, size_t bytes) {
  size_t count = 0;
  for (size_t i = kPutLane + 1; i < lanes_.size(); ++i) {
    if (lanes_[i].stands.load(std::memory_order_acquire))
      lanes[count++] = lanes_[i].made.load(std::memory_order_relaxed);
  }
  if (count + 1 < lanes_.size() && first().unansweredBytes() + bytes >= kLargeBytes) wantLanes();
  return count;
}

template <typename Request>
Status TcpChannel::transfer(const Request& request) {
  DataLanes data;
  const size_t bytes = memoryOf(request).size();
  const size_t count = dataLanes(data, bytes);
  const std::span<const Request> whole(&request, 1);
  if (count == 0) return begin(first(), whole);

  const size_t pieces = std::clamp<size_t>(bytes / kSplitBytes, 1, count);
  if (pieces == 1) return beginOn(*leastLoaded({data.data(), count}), whole);
  const size_t step = (bytes / pieces + 4095) / 4096 * 4096;
  for (size_t i = 0, at = 0; at < bytes; ++i, at += step) {
    const size_t length = std::min(step, bytes - at);
    Request piece = request;
    piece.offset += at;
    cutTo(piece, at, length);
    const Status begun = beginOn(*data[i], std::span<const Request>(&piece, 1));
    if (begun.ok()) continue;
    if (i == 0) return begun;
    // Other pieces are under way, so the transfer has begun: it ends with an error.
    endAtOnce(request, begun);
    return {};
  }
  return {};
}

// Gives each lane a share of about the same number of bytes, with few system calls.
template <typename Request>
Status TcpChannel::transferAll(std::span<const Request> requests) {
  size_t bytes = 0;
  for (const Request& request : requests) bytes += memoryOf(request).size();
  DataLanes data;
  const size_t count = dataLanes(data, bytes);
  if (count == 0) return begin(first(), requests);
  const size_t share = std::max(bytes / count, kLeastShare);
  for (size_t from = 0, to = 0; from < requests.size(); from = to) {
    for (size_t sum = 0; to < requests.size() && sum < share; ++to)
      sum += memoryOf(requests[to]).size() + kLeastCost;
    if (to == from + 1 && memoryOf(requests[from]).size() >= 2 * kSplitBytes) {
      const Status begun = transfer(requests[from]);
      if (begun.ok()) continue;
      if (from == 0) return begun;
      endAtOnce(requests[from], begun);
      continue;
    }
    const auto some = requests.subspan(from, to - from);
    const Status begun = beginOn(*leastLoaded({data.data(), count}), some);
    if (begun.ok()) continue;
    if (from == 0) return begun;
    for (const Request& request : some) endAtOnce(request, begun);
  }
  return {};
}

// Begins on a data lane. If that was retired since it was chosen, begins on the first lane.
template <typename Request>
Status TcpChannel::beginOn(StreamConnection& lane, std::span<const Request> some) {
  const Status begun = begin(lane, some);
  return begun.code() == ErrorCode::kInterrupted ? begin(first(), some) : begun;
}

template Status TcpChannel::transfer(const GetRequest&);
template Status TcpChannel::transfer(const WriteRequest&);
template Status TcpChannel::transferAll(std::span<const GetRequest>);
template Status TcpChannel::transferAll(std::span<const WriteRequest>);

void TcpChannel::wantLanes() {
  const auto now = Clock::now().time_since_epoch().count();
  auto due = nextWish_.load(std::memory_order_relaxed);
  const auto pause = pause_.load(std::memory_order_relaxed);
  const auto next = now + jittered(Clock::duration(pause)).count();
  if (now < due || !nextWish_.compare_exchange_strong(due, next)) return;
  if (options_.makeLanes) {
    options_.makeLanes(shared_from_this());
  } else {
    first().askForLanes();
  }
}

void TcpChannel::waitLonger() {
  pause_ = doubled(Clock::duration(pause_.load(std::memory_order_relaxed)), kMostPause).count();
}

void TcpChannel::cancel(const Completion* completion) {
  for (const Lane& lane : lanes_) {
    if (auto* made = lane.made.load(std::memory_order_acquire)) made->cancel(completion);
  }
}

uint64_t TcpChannel::lifeSigns() const {
  uint64_t sum = 0;
  for (const Lane& lane : lanes_) {
    if (auto* made = lane.made.load(std::memory_order_acquire)) sum += made->lifeSigns();
  }
  return sum;
}

// Lanes that are made from now on start fenced.
void TcpChannel::fence() {
  {
    Lock lock(mutex_);
    fenced_ = true;
  }
  for (const Lane& lane : lanes_) {
    if (auto* made = lane.made.load(std::memory_order_acquire)) made->fence();
  }
}

// For good. Says goodbye if the reason is kAborted.
void TcpChannel::end(const Error& why) {
  {
    Lock lock(mutex_);
    ended_ = closed_ = true;
  }
  for (const Lane& lane : lanes_) {
    if (auto* made = lane.made.load(std::memory_order_acquire)) made->close(why);
  }
}

bool TcpChannel::isClosed() const {
  Lock lock(mutex_);
  return closed_;
}

uint64_t TcpChannel::attempt() const {
  Lock lock(mutex_);
  return attempt_;
}

// A close() on another thread comes entirely before or after this.
bool TcpChannel::reconnect(Fd firstLane, uint64_t attempt) {
  Lock lock(mutex_);
  if (closed_ || attempt <= attempt_) return false;
  attempt_ = attempt;
  for (Lane& lane : lanes_) {
    lane.stands.store(false, std::memory_order_release);
    lane.isRetiring = false;
    if (lane.connection) lane.connection->close({ErrorCode::kPeerLost, "the peer connected anew"});
  }
  ended_ = false;
  startLane(kPutLane, std::move(firstLane));
  return true;
}

bool TcpChannel::beginLane(uint16_t lane) {
  return !lanes_[lane].stands.load(std::memory_order_acquire) && !lanes_[lane].isRetiring &&
         !std::exchange(lanes_[lane].isBeingMade, true);
}

void TcpChannel::endLane(uint16_t lane, bool isMade) {
  lanes_[lane].isBeingMade = false;
  if (!isMade) waitLonger();
}

bool TcpChannel::addLane(uint16_t lane, Fd socket, uint64_t attempt) {
  Lock lock(mutex_);
  if (ended_ || attempt != attempt_ || lane == kPutLane || lane >= lanes_.size()) return false;
  if (lanes_[lane].stands.load(std::memory_order_relaxed)) return false;
  startLane(lane, std::move(socket));
  stoodAt_ = Clock::now();
  failpoint("lane-stands");
  return true;
}

// Only the end that makes lanes retires them, so two lanes of one number never exist at once.
size_t TcpChannel::restConnections() {
  if (!options_.makeLanes) return 0;
  size_t count = 0;
  Lock lock(mutex_);
  for (size_t i = kPutLane + 1; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    if (ended_ || !lane.stands.load(std::memory_order_relaxed)) continue;
    const uint64_t signs = lane.connection->lifeSigns();
    const bool isIdle = std::exchange(lane.restedAt, signs) == signs;
    if (!isIdle || !lane.connection->retire()) continue;
    lane.stands.store(false, std::memory_order_release);
    lane.isRetiring = true;
    ++count;
  }
  return count;
}

size_t TcpChannel::connections() const {
  size_t count = 0;
  for (const Lane& lane : lanes_) count += lane.stands.load(std::memory_order_relaxed);
  return count;
}

// On the loop's thread. The peer has retired the lane.
void TcpChannel::laneRetired(size_t index, uint64_t life) {
  Lock lock(mutex_);
  Lane& lane = lanes_[index];
  if (ended_ || lane.life.load(std::memory_order_relaxed) != life) return;
  lane.stands.store(false, std::memory_order_release);
  if (lane.connection->endIfIdle()) return;
  context_.loop.runAt(Deadline::after(kDraining), [weak = weak_from_this(), index, life] {
    if (const auto alive = weak.lock()) alive->laneRetired(index, life);
  });
}

// On the loop's thread. A goodbye counts only on lane 0, where it comes after the last put.
void TcpChannel::laneEnded(size_t index, uint64_t life, const Status& how) {
  {
    Lock lock(mutex_);
    if (lanes_[index].life.load(std::memory_order_relaxed) != life) return;  // made again since
    if (how.ok() && index != kPutLane) {  // retired, or the peer closes all of them
      lanes_[index].stands.store(false, std::memory_order_release);
      lanes_[index].isRetiring = false;
      return;
    }
    if (std::exchange(ended_, true)) return;
    // Never reconnect to a peer that has left, or that breaks the protocol.
    closed_ = how.ok() || how.code() == ErrorCode::kProtocol;
    for (Lane& lane : lanes_) lane.stands.store(false, std::memory_order_release);
    if (Clock::now() - stoodAt_ < kLongLife) {
      waitLonger();
    } else {
      pause_ = kLeastPause.count();
    }
  }
  const Error why = how.ok() ? Error{ErrorCode::kPeerLost, "the peer said goodbye"} : how.error();
  log(LogLevel::kDebug, "tcp", "lane ", index, " of attempt ", attempt(), " ended: ", why.message);
  for (const Lane& lane : lanes_) {
    if (lane.connection) lane.connection->close(why);
  }
  context_.onEnded(
      options_.peer,
      {how.ok() ? Evidence::Kind::kGoodbye : Evidence::Kind::kUnreachable, why.message});
}

}  // namespace mooncake
