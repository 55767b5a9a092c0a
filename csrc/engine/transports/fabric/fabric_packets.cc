#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "engine/stream/wire.h"
#include "engine/transports/fabric/fabric_channel.h"

// How packets reach cards, and come from them.
namespace mooncake {

// Holds the packet and the channel until the card is done with it. That it came through the peer
// says, not the card.
class FabricChannel::SendPacket final : public RailOperation {
 public:
  SendPacket(std::shared_ptr<FabricChannel> channel, std::shared_ptr<OutPacket> packet, size_t path,
             RailPeer peer)
      : channel_(std::move(channel)),
        packet_(std::move(packet)),
        path_(path),
        peer_(peer),
        epoch_(channel_->epoch_) {
    packet_->enterCard();
  }
  ~SendPacket() override {
    if (packet_) packet_->leaveCard();
  }

  Status begin(Nic& nic) override {
    return nic.send(peer_.number,
                    channel_->rails_->pool().as(path_, packet_->data(), packet_->length), {}, this);
  }
  void end(const NicCompletion& how) override {
    // Else the buffer would be another packet's while the card may still send from it.
    if (!how.abandoned) std::exchange(packet_, nullptr)->leaveCard();
    if (how.error != NicError::kNone) channel_->onSendFailed(path_, epoch_, how);
  }
  RailShare& share() const override { return channel_->operations_; }
  uint64_t generation() const override { return peer_.generation; }

 private:
  const std::shared_ptr<FabricChannel> channel_;
  std::shared_ptr<OutPacket> packet_;
  const size_t path_;
  const RailPeer peer_;
  const uint64_t epoch_;
};

// ---- how they leave

void FabricChannel::activate() {
  if (isActive_ || closed_) return;
  isActive_ = true;
  rails_->activate(shared_from_this());
}

void FabricChannel::pump(Clock::time_point now) {
  if (!below_ || !theirs_ || closed_) return;
  const auto leave = [this](size_t path, const auto& packet) { return submit(path, packet); };
  stream_.sendPlain(leave);
  if (lost_) return;
  if (!unmoved_.empty()) moveOn(now);
  stream_.send(now, leave);
  if (stream_.isBusy() || !unmoved_.empty()) activate();
}

// False: the peer's card cannot be addressed.
bool FabricChannel::submit(size_t path, const std::shared_ptr<OutPacket>& packet) {
  const auto peer = peerAt(path);
  if (!peer) return false;
  rails_->submit(path, std::make_unique<SendPacket>(shared_from_this(), packet, path, *peer));
  return true;
}

std::optional<RailPeer> FabricChannel::peerAt(size_t path) {
  auto& peer = peers_[path];
  if (peer && peer->generation == rails_->generation(path)) return peer;
  peer.reset();
  const auto inserted =
      (*rails_)[path].insert(theirs_->rails[path % theirs_->rails.size()].address);
  if (inserted.ok()) peer = *inserted;
  return peer;
}

void FabricChannel::onSendFailed(size_t path, uint64_t epoch, const NicCompletion& how) {
  std::lock_guard lock(mutex_);
  if (closed_ || lost_ || fenced_ || !theirs_ || epoch != epoch_) return;
  const auto now = Clock::now();
  stream_.leaveOut(path, now,
                   how.error == NicError::kDevice ? "the card does not work"
                                                  : "the card could not reach the peer's");
  pump(now);
  activate();
}

// ---- how they come through

void FabricChannel::onPacket(size_t rail, const Packet& packet, ByteView data) {
  std::lock_guard lock(mutex_);
  if (closed_ || packet.incarnation != incarnation_) return;
  received_.fetch_add(Packet::kBytes + data.size(), std::memory_order_relaxed);
  const auto now = Clock::now();
  apply(stream_.receive(rail, packet, data, now), packet, data);
  pump(now);
}

// Under the lock. Deals with the effect of a packet that has come.
void FabricChannel::apply(PacketStream::Effect effect, const Packet& packet, ByteView data) {
  if (effect.answered) warmUp_.answered(*effect.answered);
  if (effect.isBack) endWait({});
  if (effect.isUnexpected && awaitPackets(packet.number)) effect = stream_.land(packet, data);
  if (!effect.end) return;
  // For tests: the completion is lost, though the data has come.
  if (effect.end->code == ErrorCode::kOk) perhapsBreak();
  finish(effect.end->transfer, effect.end->code);
}

// About every millisecond, while something is under way.
bool FabricChannel::tick(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  isActive_ = false;
  if (closed_ || lost_ || !theirs_) return false;
  if (fenced_ && !onPath_) return false;  // no card has to reach the peer any more
  stream_.tick(now);
  if (warmUp_.hasCallers()) askCold(now);
  const Paths& paths = stream_.paths();
  const auto since = paths.allOutSince();
  if (!paths.stalled(now).empty() || (since && now - *since > options_.pathLimit)) ask(now);
  if (isHeldUp(now)) {
    breakOff("it has not taken what it asked for");
    return false;
  }
  isActive_ = true;  // pump() does not ask for what we say here
  pump(now);
  isActive_ =
      stream_.isBusy() || warmUp_.hasCallers() || !unmoved_.empty() || heldUpSince_.has_value();
  return isActive_;
}

}  // namespace mooncake
