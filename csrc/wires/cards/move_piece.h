#pragma once

#include <memory>
#include <utility>

#include "wires/cards/fabric_channel.h"

namespace mooncake {

// Moves one piece of a transfer. Holds the channel and the transfer until the card is done with it.
class MovePiece final : public RailOperation {
 public:
  MovePiece(std::shared_ptr<FabricChannel> channel, CardPiece piece)
      : channel_(std::move(channel)), piece_(std::move(piece)) {}

  Status begin(Nic& nic) override {
    CardTransfer& transfer = *piece_.transfer;
    if (!transfer.gate.enter()) return {ErrorCode::kAborted, "the transfer has ended"};
    transfer.rails.fetch_or(uint64_t(1) << piece_.path, std::memory_order_relaxed);
    const NicBuffer here{transfer.memory.subspan(piece_.position, piece_.bytes), piece_.memory};
    Status begun = transfer.writes()
                       ? nic.write(piece_.peer.number, here, piece_.key, piece_.offset, this)
                       : nic.read(piece_.peer.number, here, piece_.key, piece_.offset, this);
    hasBegun_ = begun.ok();
    if (!hasBegun_) transfer.gate.leave();
    return begun;
  }
  void end(const NicCompletion& how) override {
    if (hasBegun_) piece_.transfer->gate.leave();
    channel_->onMoved(piece_, hasBegun_, how);
  }
  RailShare& share() const override { return channel_->share(); }
  uint64_t generation() const override { return piece_.peer.generation; }
  bool endsWithTheCard() const override { return true; }

 private:
  const std::shared_ptr<FabricChannel> channel_;
  const CardPiece piece_;
  bool hasBegun_ = false;
};

}  // namespace mooncake
