#include "wires/fabric/libfabric_transport.h"

#include "base/log.h"
#include "wires/nic/libfabric/cards.h"

namespace mooncake {

Result<std::unique_ptr<Transport>> createLibfabricTransport(const TransportContext& context,
                                                            FabricTransport::Create below) {
  const auto env = FabricEnv::read(context.env);
  if (!env.ok()) return env.error();
  return createLibfabricTransport(context, below, *env);
}

Result<std::unique_ptr<Transport>> createLibfabricTransport(const TransportContext& context,
                                                            FabricTransport::Create below,
                                                            const FabricEnv& env) {
  const auto cards = listLibfabricCards(env);
  if (!cards.ok()) return cards.error();
  FabricTransport::Options options;
  options.threads = env.pollThreads;
  options.channel.splitBytes = env.stripingThreshold;
  options.makeNics = [&](const FabricTransport::Carry&) -> Result<FabricTransport::Nics> {
    FabricTransport::Nics nics;
    for (const LibfabricCard& card : *cards) {
      auto nic = openLibfabricNic(card, env);
      if (!nic.ok()) return nic.error();
      log(LogLevel::kInfo, "fabric", "card ", (*nic)->name(), ", provider ", (*nic)->provider());
      nics.push_back(std::move(*nic));
    }
    return nics;
  };
  options.reopen = [cards = *cards, env](size_t index) {
    return openLibfabricNic(cards[index], env);
  };
  return FabricTransport::create(context, below, std::move(options));
}

}  // namespace mooncake
