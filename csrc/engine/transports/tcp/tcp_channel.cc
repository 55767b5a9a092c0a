#include "engine/transports/tcp/tcp_channel.h"

#include <algorithm>

#include "base/log.h"
#include "engine/transports/tcp/socket.h"

namespace mooncake {

std::shared_ptr<TcpChannel> TcpChannel::start(const TransportContext& context, const EngineId& peer,
                                              std::vector<Fd> lanes, uint64_t attempt) {
  std::shared_ptr<TcpChannel> channel(new TcpChannel(context, peer));
  // A lane may end before the last one has started: laneEnded() waits for the lock.
  std::lock_guard lock(channel->mutex_);
  channel->attempt_ = attempt;
  for (Fd& lane : lanes) {
    const std::weak_ptr<TcpChannel> weak = channel;
    const size_t index = channel->lanes_.size();
    const auto ended = [weak, index](const Status& how) {
      if (const auto alive = weak.lock()) alive->laneEnded(index, how);
    };
    keepLocalQueueShort(lane.get());
    channel->lanes_.push_back(StreamConnection::start(
        std::move(lane), context.loop, context.regions,
        {.onMessage = [peer, &context](ByteView message) { context.onMessage(peer, message); },
         .onClosed = ended}));
  }
  return channel;
}

Status TcpChannel::get(const GetRequest& request) {
  const size_t first = firstDataLane();
  const size_t bytes = request.target.size();
  const size_t pieces = std::clamp<size_t>(bytes / kSplitBytes, 1, lanes_.size() - first);
  if (pieces == 1) {
    const auto lane = std::min_element(
        lanes_.begin() + first, lanes_.end(),
        [](const auto& a, const auto& b) { return a->unansweredBytes() < b->unansweredBytes(); });
    return (*lane)->get(request);
  }
  const size_t step = (bytes / pieces + 4095) / 4096 * 4096;
  for (size_t i = 0, at = 0; at < bytes; ++i, at += step) {
    const size_t length = std::min(step, bytes - at);
    const Status begun =
        lanes_[first + i]->get({request.region, request.offset + at,
                                request.target.subspan(at, length), request.completion});
    if (begun.ok()) continue;
    if (i == 0) return begun;
    // Other pieces are under way, so the get has begun: it ends with an error.
    request.completion->begin();
    request.completion->end(begun.code());
    return {};
  }
  return {};
}

void TcpChannel::cancelGets(const Completion* completion) {
  for (const auto& lane : lanes_) lane->cancelGets(completion);
}

uint64_t TcpChannel::lifeSigns() const {
  uint64_t sum = 0;
  for (const auto& lane : lanes_) sum += lane->lifeSigns();
  return sum;
}

void TcpChannel::fence() {
  for (const auto& lane : lanes_) lane->fence();
}

void TcpChannel::close() {
  {
    std::lock_guard lock(mutex_);
    ended_ = closed_ = true;
  }
  for (const auto& lane : lanes_) lane->close();
}

bool TcpChannel::isClosed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

// A close() on another thread comes before or after all of this.
bool TcpChannel::renew(std::vector<Fd> lanes, uint64_t attempt) {
  std::lock_guard lock(mutex_);
  if (closed_ || attempt <= attempt_ || lanes.size() != lanes_.size()) return false;
  attempt_ = attempt;
  for (const auto& lane : lanes_) lane->close({ErrorCode::kPeerLost, "the peer connected anew"});
  ended_ = false;
  for (size_t i = 0; i < lanes.size(); ++i) {
    keepLocalQueueShort(lanes[i].get());
    lanes_[i]->renew(std::move(lanes[i]));
  }
  return true;
}

// On the loop's thread. The first lane that breaks takes the others with it: half a channel is of
// no use. A goodbye counts when it comes on the lane of the puts, behind the last of them.
void TcpChannel::laneEnded(size_t lane, const Status& how) {
  if (how.ok() && lane != kPutLane) return;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(ended_, true)) return;
    // Neither who has left nor who does not speak our language is connected to again.
    closed_ = how.ok() || how.code() == ErrorCode::kProtocol;
  }
  const Error why = how.ok() ? Error{ErrorCode::kPeerLost, "the peer said goodbye"} : how.error();
  log(LogLevel::kDebug, "tcp", "lane ", lane, " of attempt ", attempt_, " ended: ", why.message);
  for (const auto& lane : lanes_) lane->close(why);
  context_.onEnded(
      peer_, {how.ok() ? Evidence::Kind::kGoodbye : Evidence::Kind::kUnreachable, why.message});
}

}  // namespace mooncake
