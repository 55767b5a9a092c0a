#pragma once

#include <memory>
#include <optional>

#include "engine/nic/sim/sim_cards.h"
#include "engine/transports/fabric/fabric_transport.h"

namespace mooncake {

// Transport fabric over cards that are worse than any real one (SimNic), for tests: never chosen
// unless asked for by name. What env.simSeed decides goes wrong, and connections break.
struct SimOptions {
  size_t cards = 0;  // 0: one to three, by the seed
  SimOdds odds;
  bool withdrawalStops = true;                        // see NicLimits
  std::optional<bool> closeEndsReads = std::nullopt;  // the same; none: by the seed
  // A channel breaks once in so many transfers, at the end that connected; 0: never.
  uint32_t breakOdds = 500;
  std::shared_ptr<SimCards> made = nullptr;  // if not null, it knows the cards
  FabricChannel::Options channel = {};
};
Result<std::unique_ptr<Transport>> createSimTransport(const TransportContext& context,
                                                      FabricTransport::Create below,
                                                      const SimOptions& options = {});

}  // namespace mooncake
