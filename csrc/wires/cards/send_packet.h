#pragma once

#include <memory>
#include <utility>

#include "wires/cards/fabric_channel.h"

namespace mooncake {

// Sends one packet. Holds the packet and the channel until the card is done with it. The peer, not
// the card, says that the packet has arrived.
class SendPacket final : public RailOperation {
 public:
  // `epoch` is the channel's connection: a failure says nothing about a later one.
  SendPacket(std::shared_ptr<FabricChannel> channel, uint64_t epoch,
             std::shared_ptr<OutPacket> packet, size_t path, RailPeer peer)
      : channel_(std::move(channel)),
        packet_(std::move(packet)),
        path_(path),
        peer_(peer),
        epoch_(epoch) {
    packet_->enterCard();
  }
  ~SendPacket() override {
    if (packet_) packet_->leaveCard();
  }

  Status begin(Nic& nic) override {
    return nic.send(peer_.number, channel_->pool().as(path_, packet_->data(), packet_->length), {},
                    this);
  }
  void end(const NicCompletion& how) override {
    // The card may still send from the buffer of an abandoned packet, so that is kept.
    if (!how.abandoned) std::exchange(packet_, nullptr)->leaveCard();
    if (how.error != NicError::kNone) channel_->onSendFailed(path_, epoch_, how);
  }
  RailShare& share() const override { return channel_->share(); }
  uint64_t generation() const override { return peer_.generation; }

 private:
  const std::shared_ptr<FabricChannel> channel_;
  std::shared_ptr<OutPacket> packet_;
  const size_t path_;
  const RailPeer peer_;
  const uint64_t epoch_;
};

}  // namespace mooncake
