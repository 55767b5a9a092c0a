#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "wires/cards/fabric_transport.h"
#include "wires/nic/sim/sim_cards.h"

namespace mooncake {

// The fabric transport over cards that are worse than any real one (SimNic), for tests. Only used
// if asked for by name. env.simSeed decides which transfers fail; connections break, too.
struct SimOptions {
  size_t cards = 0;  // 0: one to three, by the seed
  SimOdds odds;
  bool withdrawalStops = true;                        // see NicLimits
  std::optional<bool> closeEndsReads = std::nullopt;  // see NicLimits; none: by the seed
  // See SimNic::Options. Null: memory of devices that do not order writes of cards.
  std::function<bool(const std::byte* memory)> landsBehind = nullptr;
  // A channel breaks once in this many transfers, at the end that connected. 0: never.
  uint32_t breakOdds = 500;
  std::shared_ptr<SimCards> made = nullptr;  // the cards to use; null: new ones
  FabricChannel::Options channel = {};
};
// Options of transport `sim` where an engine creates it. Tests change them before that.
SimOptions& defaultSimOptions();

Result<std::unique_ptr<Transport>> createSimTransport(const TransportContext& context,
                                                      FabricTransport::Create below,
                                                      const SimOptions& options = {});

}  // namespace mooncake
