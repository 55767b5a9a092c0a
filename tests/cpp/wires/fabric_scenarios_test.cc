// Many short lives of a channel over cards that misbehave, each by its own seed.
// MOONCAKE_TEST_SCENARIOS is their number, MOONCAKE_TEST_SEED the first seed.
#include <cstdlib>
#include <random>

#include "wire_end.h"
#include "wires/sim/sim_transport.h"
#include "wires/tcp/tcp_transport.h"

namespace mooncake::testing {
namespace {

uint64_t numberIn(const char* text, uint64_t otherwise) {
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

class Scenario {
 public:
  explicit Scenario(uint64_t seed) : random_(seed) {
    EngineEnv env = onLoopback();
    env.simSeed = seed;
    for (End* end : {&a_, &b_}) {
      end->cards = std::make_shared<SimCards>();
      SimOptions options{.cards = 1 + below(4),
                         .odds = {.failed = odds(),
                                  .late = odds(),
                                  .lateWrites = odds() / 10,
                                  .lost = odds(),
                                  .storm = odds(),
                                  .death = odds() * 10},
                         .withdrawalStops = below(2) == 0,
                         .closeEndsReads = below(2) == 0,
                         .breakOdds = 0,
                         .made = end->cards,
                         .channel = {.splitBytes = 1 + below(100'000),
                                     .leastByCard = 1 + below(40'000),
                                     .stallLimit = std::chrono::milliseconds(20),
                                     .pathLimit = std::chrono::seconds(10)}};
      end->count = options.cards;
      end->wire = std::make_unique<WireEnd>(env, [&](const TransportContext& context) {
        return createSimTransport(context, TcpTransport::create, options);
      });
      // Some of the lives use packets only.
      isByCards_ = isByCards_ || below(2) == 0;
      end->part = std::make_unique<Part>(end->wire->part(
          kPart, kRemoteRead | kRemoteWrite | (isByCards_ ? uint32_t(kLasting) : 0)));
      const Bytes data = pattern(kEach, seed);
      for (size_t i = 0; i < kSlots; ++i)
        std::copy(data.begin(), data.end(), end->part->bytes().begin() + gettable(i));
    }
    auto connected = connectNow(*a_.wire, *b_.wire);
    EXPECT_TRUE(connected.ok());
    if (!connected.ok()) return;
    a_.channel = *connected;
    b_.channel = b_.wire->acceptedFrom(a_.wire->id());
  }
  ~Scenario() {
    for (End* end : {&a_, &b_}) {
      if (end->channel) end->channel->close();
      end->channel.reset();
    }
  }

  void run(uint64_t seed) {
    if (!a_.channel || !b_.channel) return;
    const Bytes gettableData = pattern(kEach, seed);
    Bytes targets(kSlots * kEach), written;
    const auto slotOf = [](Bytes& all, size_t slot) {
      return std::span(all).subspan(slot * kEach, kEach);
    };
    Completion completion(&bell_);
    std::array<uint64_t, kSlots> stampsA{}, stampsB{};
    for (size_t i = 0; i < kSlots; ++i) {
      const Bytes one = pattern(kEach, seed + i);
      written.insert(written.end(), one.begin(), one.end());
    }
    const uint32_t lasting = isByCards_ ? uint32_t(kLasting) : 0;
    auto inTargets = a_.wire->regions().add(targets.data(), targets.size(), lasting | kLanding);
    auto inWritten = a_.wire->regions().add(written.data(), written.size(), lasting);
    EXPECT_TRUE(inTargets.ok() && inWritten.ok());
    // After this get, the keys are there or on their way.
    Completion first(&bell_);
    EXPECT_TRUE(a_.channel->get({b_.part->remote(), gettable(0), slotOf(targets, 0), &first}).ok());
    EXPECT_EQ(endOf(first), ErrorCode::kOk);
    const auto card = [&](End& end) { return below(end.count); };
    for (size_t step = 0; step < 20; ++step) {
      End& from = below(2) == 0 ? a_ : b_;
      End& to = &from == &a_ ? b_ : a_;
      auto& stamps = &from == &a_ ? stampsA : stampsB;
      const size_t slot = below(kSlots);
      switch (below(6)) {
        case 0:
        case 1: {
          const uint64_t stamp = ++stamps[slot];
          EXPECT_TRUE(from.channel
                          ->put({to.part->remote(),
                                 puttable(slot),
                                 pattern(kEach, seed + slot + stamp),
                                 {64 + 8 * slot, stampOf(stamp)}})
                          .ok());
          break;
        }
        case 2:
          if (&from == &a_ && !wanted_[slot]) {
            EXPECT_TRUE(
                from.channel
                    ->get({to.part->remote(), gettable(slot), slotOf(targets, slot), &completion})
                    .ok());
            wanted_[slot] = true;
          }
          break;
        case 3:
          if (&from == &a_ && !isWritten_[slot]) {
            isWritten_[slot] = true;
            EXPECT_TRUE(
                from.channel
                    ->write({to.part->remote(), writable(slot), slotOf(written, slot), &completion})
                    .ok());
          }
          break;
        case 4:
          if (below(4) == 0) from.cards->kill(card(from));
          break;
        case 5:
          for (size_t i = 0; i < from.count; ++i) from.cards->revive(i);
          break;
      }
    }
    for (End* end : {&a_, &b_}) {
      for (size_t i = 0; i < end->count; ++i) end->cards->revive(i);
    }
    EXPECT_EQ(endOf(completion), ErrorCode::kOk);
    for (size_t slot = 0; slot < kSlots; ++slot) {
      EXPECT_TRUE(!wanted_[slot] || std::ranges::equal(slotOf(targets, slot), gettableData));
      EXPECT_TRUE(!isWritten_[slot] || b_.part->holds(writable(slot), slotOf(written, slot)));
      for (const auto& [part, stamps] :
           {std::pair(b_.part.get(), &stampsA), std::pair(a_.part.get(), &stampsB)}) {
        const uint64_t stamp = (*stamps)[slot];
        if (stamp == 0) continue;
        EXPECT_TRUE(eventually([&] { return part->word(64 + 8 * slot).load() == stampOf(stamp); }));
        EXPECT_TRUE(part->holds(puttable(slot), pattern(kEach, seed + slot + stamp)));
      }
    }
    EXPECT_EQ(a_.wire->endedCount() + b_.wire->endedCount(), 0u) << "nothing broke";
  }

 private:
  static constexpr size_t kSlots = 4, kEach = 70'000;
  static constexpr size_t kPart = 4096 + 3 * kSlots * kEach;
  struct End {
    std::shared_ptr<SimCards> cards;
    size_t count = 0;
    std::unique_ptr<WireEnd> wire;
    std::unique_ptr<Part> part;
    std::shared_ptr<Channel> channel;
  };
  static size_t puttable(size_t slot) { return 4096 + slot * kEach; }
  static size_t gettable(size_t slot) { return 4096 + (kSlots + slot) * kEach; }
  static size_t writable(size_t slot) { return 4096 + (2 * kSlots + slot) * kEach; }
  uint64_t below(uint64_t end) { return random_() % end; }
  uint32_t odds() { return below(3) == 0 ? 0 : static_cast<uint32_t>(10 + below(200)); }

  std::mt19937_64 random_;
  Doorbell bell_;
  bool isByCards_ = false;
  std::array<bool, kSlots> wanted_{}, isWritten_{};
  End a_, b_;
};

TEST(FabricScenarios, EveryByteComesOnceWhateverTheCardsDo) {
  const uint64_t first = numberIn(std::getenv("MOONCAKE_TEST_SEED"), 1);
  const uint64_t count = numberIn(std::getenv("MOONCAKE_TEST_SCENARIOS"), 60);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Scenario(seed).run(seed);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace mooncake::testing
