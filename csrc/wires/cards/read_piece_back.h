#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "wires/cards/fabric_channel.h"

namespace mooncake {

// Reads the last bytes of a piece that the same card has written (ReadBacks), into memory where
// they are never looked at. Holds the channel until the card is done with it.
class ReadPieceBack final : public RailOperation {
 public:
  ReadPieceBack(std::shared_ptr<FabricChannel> channel, CardPiece piece)
      : channel_(std::move(channel)), piece_(std::move(piece)) {}

  Status begin(Nic& nic) override {
    const uint64_t bytes = std::min(piece_.bytes, ReadBacks::kMostBytes);
    const Status begun = nic.read(piece_.peer.number, channel_->pool().scratch(piece_.path, bytes),
                                  piece_.key, piece_.offset + piece_.bytes - bytes, this);
    hasBegun_ = begun.ok();
    return begun;
  }
  void end(const NicCompletion& how) override { channel_->onReadBack(piece_.path, hasBegun_, how); }
  RailShare& share() const override { return channel_->share(); }
  uint64_t generation() const override { return piece_.peer.generation; }

 private:
  const std::shared_ptr<FabricChannel> channel_;
  const CardPiece piece_;
  bool hasBegun_ = false;
};

}  // namespace mooncake
