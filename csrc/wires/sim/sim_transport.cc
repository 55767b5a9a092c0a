#include "wires/sim/sim_transport.h"

#include "base/log.h"
#include "base/mutex.h"
#include "device/memory_owner.h"

namespace mooncake {
namespace {

// Decides when a channel breaks. Called by each thread that begins a transfer.
class Breaks {
 public:
  Breaks(uint64_t seed, uint32_t odds) : dice_(seed), odds_(odds) {}
  bool operator()() {
    Lock lock(mutex_);
    return dice_.once(odds_);
  }

 private:
  Mutex mutex_;
  SimDice dice_ GUARDED_BY(mutex_);
  const uint32_t odds_;
};

bool isUnordered(const std::byte* memory) {
  const auto owner = ownerOf(memory, 1);
  return owner.ok() && *owner && !owner->accelerator->ordersCardWrites(owner->device);
}

}  // namespace

SimOptions& defaultSimOptions() {
  static SimOptions options;
  return options;
}

Result<std::unique_ptr<Transport>> createSimTransport(const TransportContext& context,
                                                      FabricTransport::Create below,
                                                      const SimOptions& options) {
  const auto cards = options.made ? options.made : std::make_shared<SimCards>();
  const uint64_t seed = context.env.simSeed;
  FabricTransport::Options fabric{.channel = options.channel, .threads = 0};
  fabric.channel.name = "sim";
  fabric.makeNics = [cards, seed, options, id = context.id](
                        FabricTransport::Carry carry) -> Result<FabricTransport::Nics> {
    const size_t count = options.cards != 0 ? options.cards : 1 + seed % 3;
    return cards->make(count,
                       {.host = id,
                        .seed = seed,
                        .odds = options.odds,
                        .carry = std::move(carry),
                        .onGone = nullptr,
                        .withdrawalStops = options.withdrawalStops,
                        .closeEndsReads = options.closeEndsReads.value_or(seed % 2 == 0),
                        .landsBehind = options.landsBehind ? options.landsBehind : isUnordered});
  };
  fabric.reopen = [cards](size_t index) -> Result<std::unique_ptr<Nic>> {
    return cards->renew(index);
  };
  fabric.onCarried = [cards](const EngineId& peer, ByteView bytes) { cards->arrive(peer, bytes); };
  // The n-th channel that this side called breaks at the same points in every run.
  fabric.adapt = [seed, odds = options.breakOdds, called = uint64_t(0),
                  mutex = std::make_shared<Mutex>()](FabricChannel::Options channel,
                                                     bool isOurs) mutable {
    if (isOurs && odds != 0) {
      Lock lock(*mutex);
      const auto breaks = std::make_shared<Breaks>(seed * 0x9e3779b97f4a7c15 + ++called, odds);
      channel.breaks = [breaks] { return (*breaks)(); };
    }
    return channel;
  };
  log(LogLevel::kInfo, "sim", "cards lose, delay and shuffle what they carry, by seed ", seed);
  return FabricTransport::create(context, below, std::move(fabric));
}

}  // namespace mooncake
