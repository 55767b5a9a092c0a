#include <algorithm>
#include <cstring>

#include "base/crypto.h"
#include "base/log.h"
#include "engine/transports/fabric/fabric_channel.h"

// How things end, and begin anew.
namespace mooncake {
namespace {

// From one break that a test asks for to the next. Far less than a failure timeout, and time enough
// for some work.
constexpr auto kLeastStanding = std::chrono::milliseconds(50);

}  // namespace

// Never 0.
uint64_t FabricChannel::newIncarnation() {
  const Nonce nonce = Crypto::randomNonce();
  uint64_t number;
  std::memcpy(&number, nonce.data(), sizeof(number));
  return number == 0 ? 1 : number;
}

void FabricChannel::finish(uint64_t transfer, ErrorCode code) {
  if (const auto part = stream_.finish(transfer, code)) onPartEnded(part->whole, part->code);
}

void FabricChannel::finishAll(ErrorCode code) {
  for (const uint64_t number : stream_.finishAll(code)) {
    if (const auto whole = moving_.find(number); whole != moving_.end()) --whole->second->open;
  }
  giveUpAll(code);
}

void FabricChannel::cancel(const Completion* completion) {
  std::unique_lock lock(mutex_);
  stream_.cancel(completion);
  const Stopped stopped = takeMoving(completion);
  lock.unlock();
  stop(stopped, ErrorCode::kAborted);
  awaitStopped(completion);
}

uint64_t FabricChannel::retire(const RemoteRegion& region) {
  std::lock_guard lock(mutex_);
  if (closed_ || fenced_ || isOut_) return 0;
  const uint64_t number = ++lastTicket_;
  Retiring& retiring = retiring_[number];
  retiring.epoch = epoch_;
  retiring.lastSerial = stream_.lastSerial();
  if (lost_ || !theirs_) return number;
  // No later piece uses the keys that the peer withdraws.
  if (const auto granted = grants_.extract(region.key); granted && granted.mapped().grant) {
    for (auto& card : granted.mapped().grant->cards) card.clear();
  }
  for (size_t card = 0; card < theirs_->rails.size(); ++card) {
    retiring.tickets.insert(++lastTicket_);
    tell(control::Retire{
        .ticket = lastTicket_, .region = region.key, .card = static_cast<uint8_t>(card)}
             .encode());
  }
  return number;
}

// A peer says HELLO on a new connection only after it has taken back all keys of the old one.
// Packets that the peer has acknowledged land before it answers RETIRE (onRetire()).
bool FabricChannel::isRetired(uint64_t number) {
  std::lock_guard lock(mutex_);
  const auto found = retiring_.find(number);
  if (found == retiring_.end()) return true;
  const Retiring& retiring = found->second;
  const bool isAnswered = retiring.tickets.empty() && !stream_.hasWritesUpTo(retiring.lastSerial);
  const bool isConnected = theirs_ && !lost_;
  if (!isOut_ && !(isConnected && (retiring.epoch != epoch_ || isAnswered))) return false;
  retiring_.erase(found);
  return true;
}

void FabricChannel::beginFence() {
  std::lock_guard lock(mutex_);
  if (std::exchange(fenced_, true)) return;
  retiring_.clear();
  control::Fenced fenced{stream_.fence(Clock::now())};
  releasePeers();
  warmUp_.end({ErrorCode::kAborted, "the peer is no longer part of the job"});
  fencing_ = {.told = std::move(fenced), .stopped = takeMoving(nullptr)};
  finishAll(ErrorCode::kAborted);
}

void FabricChannel::fence() {
  std::lock_guard once(fenceMutex_);
  beginFence();
  std::unique_lock lock(mutex_);
  auto begun = std::exchange(fencing_, std::nullopt);
  if (!begun) return;
  lock.unlock();
  if (memories_) memories_->takeBack(this);
  stop(begun->stopped, ErrorCode::kAborted);
  lock.lock();
  tell(begun->told.encode());
}

void FabricChannel::close() {
  std::shared_ptr<Channel> below;
  Stopped stopped;
  bool isFirst = false, hasLeft = false;
  {
    std::lock_guard lock(mutex_);
    below = below_;
    hasLeft = hasLeft_;
    if ((isFirst = !std::exchange(closed_, true))) {
      rails_->sinks().remove(incarnation_);
      retiring_.clear();
      stopped = takeMoving(nullptr);
      finishAll(ErrorCode::kAborted);
      if (below && !isOut_) flushPuts();
      stream_.close();
      releasePeers();
      endWait({ErrorCode::kAborted, "the channel is closed"});
      warmUp_.end({ErrorCode::kAborted, "the channel is closed"});
    }
  }
  stop(stopped, ErrorCode::kAborted);
  awaitStopped(nullptr);
  if (isFirst && memories_) {
    // What a peer that has left had under way, it has told us of.
    if (hasLeft) {
      memories_->forget(this);
    } else {
      memories_->takeBack(this);
    }
  }
  if (below && isFirst) retireWrites(stopped);
  if (below) below->close();
}

// The peer sees to it, behind our goodbye, that nothing of them comes late.
void FabricChannel::retireWrites(const Stopped& stopped) {
  std::lock_guard lock(mutex_);
  for (const auto& transfer : stopped.transfers) {
    if (!transfer->writes() || transfer->rails.load(std::memory_order_relaxed) == 0) continue;
    for (size_t card = 0; card < transfer->grant->cards.size(); ++card)
      tell(control::Retire{
          .ticket = ++lastTicket_, .region = transfer->key, .card = static_cast<uint8_t>(card)}
               .encode());
  }
}

void FabricChannel::flush() {
  std::lock_guard lock(mutex_);
  if (!closed_ && !lost_ && !isOut_ && below_) flushPuts();
}

// What was put still arrives, ahead of the goodbye, also what a break of ours holds: one that
// catches a goodbye is not cured.
void FabricChannel::flushPuts() {
  stream_.flushPuts(
      [this](ByteView bytes) { tell(control::withKind(control::Kind::kPacket, bytes)); });
}

void FabricChannel::releasePeers() {
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i]) (*rails_)[i].release(*peers_[i]);
  }
  peers_.assign(peers_.size(), std::nullopt);
}

// Puts stay for close().
void FabricChannel::lose(const Error& why) {
  if (!lost_) lost_ = why;
  stream_.breakOff();
  finishAll(ErrorCode::kPeerLost);
  warmUp_.end(*lost_);
}

void FabricChannel::breakOff(const std::string& why) {
  if (lost_) return;
  lose({ErrorCode::kPeerLost, why});
  context_.loop.post([weak = weak_from_this(), why] {
    if (const auto self = weak.lock()) self->tellOfBreak(why);
  });
}

void FabricChannel::tellOfBreak(const std::string& why) {
  if (isOver()) return;
  context_.onEnded(peer_, {Evidence::Kind::kUnreachable, why});
}

// Not before the last break is over for the engine: it must have heard of the peer.
void FabricChannel::perhapsBreak() {
  if (!options_.breaks || !options_.breaks()) return;
  if (lost_ || Clock::now() < standsUntil_ || below_->lifeSigns() == heard_) return;
  breakOff("the simulated connection broke");
}

void FabricChannel::onEnded(const Evidence& evidence) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    hasLeft_ = hasLeft_ || evidence.isGoodbye();
    const bool isKnown = lost_.has_value();
    lose({ErrorCode::kPeerLost, evidence.detail});
    endWait(*lost_);
    if (isKnown && !evidence.isGoodbye()) return;
  }
  context_.onEnded(peer_, evidence);
}

// A connection of which no card reaches the peer would break again at once: whoever makes it waits
// until one does, and may give up.
void FabricChannel::restart(Deadline deadline, std::function<void(Status)> onPath) {
  restart();
  std::lock_guard lock(mutex_);
  onPath_ = std::move(onPath);
  if (closed_) return endWait({ErrorCode::kAborted, "the channel is closed"});
  context_.loop.runAt(deadline, [weak = weak_from_this(), epoch = epoch_] {
    const auto self = weak.lock();
    if (!self) return;
    std::lock_guard lock(self->mutex_);
    if (self->epoch_ == epoch)
      self->endWait({ErrorCode::kPeerLost, "no card reaches the peer, which answers over tcp"});
  });
}

void FabricChannel::endWait(const Status& how) {
  if (!onPath_) return;
  if (!how.ok()) lose(how.error());
  context_.loop.post([onPath = std::exchange(onPath_, nullptr), how] { onPath(how); });
}

void FabricChannel::restart() {
  // What it was told counts no more, and what it had under way lands nowhere, before it hears of
  // us.
  if (memories_) memories_->takeBack(this);
  std::lock_guard lock(mutex_);
  if (closed_) return;
  endWait({ErrorCode::kPeerLost, "the connection was made anew"});
  ++epoch_;
  rails_->sinks().remove(incarnation_);
  finishAll(ErrorCode::kPeerLost);
  stream_.restart();
  offered_.clear();
  heldRetires_.clear();
  theirs_.reset();
  warmUp_.reset(0);
  warmUp_.end({ErrorCode::kPeerLost, "the connection was made anew"});
  releasePeers();
  arriving_.clear();
  lost_.reset();
  standsUntil_ = Clock::now() + kLeastStanding;
  heard_ = below_->lifeSigns();
  incarnation_ = newIncarnation();
  rails_->sinks().add(incarnation_, weak_from_this());
  sayHello();
}

void FabricChannel::resume() {
  std::vector<control::Retire> retires;
  {
    std::lock_guard lock(mutex_);
    retires = std::exchange(heldRetires_, {});
    const auto packets = stream_.release();
    if (closed_ || fenced_) return;
    for (const auto& [packet, data] : packets) apply(stream_.land(packet, data), packet, data);
    pump(Clock::now());
  }
  for (const control::Retire& retire : retires) onRetire(retire);
}

}  // namespace mooncake
