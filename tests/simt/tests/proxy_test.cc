#include "kernels/proxy/proxy.cuh"

#include <gtest/gtest.h>
#include <vector>

#include "proxy/command_ring.h"
#include "races.h"
#include "tests/simt/world.h"

// Kernels push commands, and a thread of the host takes them, as csrc/proxy does.
namespace mooncake::kernels {
namespace {

using proxy::CommandRing;
using simt::kFindsRaces;
using simt::racesReported;
using simt::World;

constexpr uint64_t kSeeds = kFindsRaces ? 6 : 40;
constexpr uint64_t kTimeoutNs = 200'000'000;
constexpr uint32_t kSignalWords = 2;

// The shared memory of a rank with rings to some peers. Numbers of commands begin at `first`.
struct Shared {
  Shared(uint32_t peers, uint32_t slots, uint32_t first = 0)
      : commands(peers * slots), counts(peers), tickets(peers), signals(peers * kSignalWords) {
    for (uint32_t peer = 0; peer < peers; ++peer) {
      counts[peer] = {.taken = first, .completed = first};
      tickets[peer] = {.reserved = first, .takenSeen = first};
    }
    view = {commands.data(), counts.data(), tickets.data(), signals.data(),
            peers,           slots,         kSignalWords,   kTimeoutNs};
  }
  CommandRing ring(uint32_t peer) {
    return {std::span(commands).subspan(peer * view.slots, view.slots), counts[peer],
            view.countLookNs == 0};
  }
  // Tells the emulator of a change that it cannot see: that of a word of the host.
  static void published() { simt::afterChange(); }

  std::vector<ProxyCommand> commands;
  std::vector<ProxyCounts> counts;
  std::vector<ProxyTickets> tickets;
  std::vector<uint64_t> signals;
  ProxyView view;
};

unsigned thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// Each thread pushes to all peers in turn. The host reads each command's source once, and completes
// commands in lots.
void pushAndTake(uint64_t seed, uint32_t peers, uint32_t slots, uint32_t first, unsigned blocks,
                 unsigned threads, unsigned each) {
  Shared shared(peers, slots, first);
  if (seed % 4 < 2) shared.view.countLookNs = 0;  // the counts lie in memory of the device
  World world({.seed = seed});
  const unsigned all = blocks * threads;
  std::vector<uint64_t> sources(size_t(all) * each);
  std::vector<unsigned> failures(all), taken(sources.size()), arrived(sources.size());
  std::vector<std::vector<uint64_t>> order(peers);
  world.launch(0, 0, "push", {blocks}, {threads}, 0, [&] {
    for (unsigned i = 0; i < each; ++i) {
      const size_t at = size_t(thread()) * each + i;
      const uint32_t peer = (thread() + i) % peers;
      sources[at] = at + 1000;
      const ProxyTicket ticket = put(shared.view, peer,
                                     {.sourceRegion = 1,
                                      .targetRegion = 2,
                                      .sourceOffset = at,
                                      .targetOffset = at + 7,
                                      .bytes = at + 9,
                                      .signal = uint32_t(at) + 3});
      failures[thread()] += ticket.result != ProxyResult::kDone;
      if (i % 3 == 2) {
        failures[thread()] +=
            awaitCommand(shared.view, peer, ticket.number) != ProxyResult::kDone || !arrived[at];
      }
    }
    for (uint32_t peer = 0; peer < peers; ++peer)
      failures[thread()] += flush(shared.view, peer) != ProxyResult::kDone;
    for (unsigned i = 0; i < each; ++i) failures[thread()] += !arrived[thread() * each + i];
  });
  world.host(0, "host", [&] {
    std::vector<CommandRing> rings;
    for (uint32_t peer = 0; peer < peers; ++peer) rings.push_back(shared.ring(peer));
    for (size_t left = sources.size(); left > 0;) {
      bool hasTaken = false;
      for (uint32_t peer = 0; peer < peers; ++peer) {
        ProxyCommand command;
        uint32_t lot = 0;
        for (; lot <= (seed + left) % 3 && rings[peer].take(command); ++lot) {
          const size_t at = command.sourceOffset;
          const bool isWhole = at < sources.size() && command.sourceRegion == 1 &&
                               command.targetRegion == 2 && command.targetOffset == at + 7 &&
                               command.bytes == at + 9 && command.signal == at + 3 &&
                               sources[at] == at + 1000;
          ASSERT_TRUE(isWhole) << "seed " << seed;
          ++taken[at];
          arrived[at] = 1;
          order[peer].push_back(at);
        }
        if (lot == 0) continue;
        hasTaken = true;
        left -= lot;
        rings[peer].publishTaken();
        rings[peer].complete(lot);
        Shared::published();
      }
      if (!hasTaken) relax();
    }
  });
  const auto report = world.run();
  ASSERT_TRUE(report.ok) << "seed " << seed << ": " << report.problem;
  // While all threads pause, time passes in steps of 16 ms, and a wait may take one: about a dozen.
  EXPECT_LT(report.virtualNs, 2 * kTimeoutNs) << "seed " << seed;
  for (const unsigned count : taken) ASSERT_EQ(count, 1u) << "seed " << seed;
  for (const unsigned count : failures) ASSERT_EQ(count, 0u) << "seed " << seed;
  for (const auto& numbers : order) {
    std::vector<uint64_t> last(all);
    for (const uint64_t at : numbers) {
      ASSERT_GE(at + 1, last[at / each]) << "a thread's commands change places, seed " << seed;
      last[at / each] = at + 1;
    }
  }
}

TEST(Proxy, EachCommandIsTakenOnceAndWhole) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    pushAndTake(seed, 1 + seed % 3, seed % 2 ? 2 : 8, 0, 2, 3, 6);
    ASSERT_EQ(racesReported(), races) << "seed " << seed;
  }
}

TEST(Proxy, NumbersWrap) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) pushAndTake(seed, 1, 4, ~0u - 8, 2, 2, 6);
}

// A thread that gives up leaves no hole: later commands go through.
TEST(Proxy, AFullRingIsLateAndGoesOn) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Shared shared(2, 4);
    World world({.seed = seed});
    uint32_t late = 0, done = 0;
    std::vector<uint64_t> offsets;
    world.launch(0, 0, "fill", {1}, {1}, 0, [&] {
      for (uint64_t i = 0; i < 6; ++i) {
        const auto ticket = put(shared.view, 0,
                                {.sourceRegion = 0,
                                 .targetRegion = 0,
                                 .sourceOffset = i,
                                 .targetOffset = 0,
                                 .bytes = 0});
        (ticket.result == ProxyResult::kDone ? done : late) += 1;
      }
      // The other peer's ring is not full.
      done += put(shared.view, 1, {}).result == ProxyResult::kDone;
    });
    world.launch(0, 0, "go on", {1}, {1}, 0, [&] {
      done += put(shared.view, 0, {0, 0, 9, 0, 0}).result == ProxyResult::kDone;
    });
    world.host(0, "host", [&] {
      CommandRing ring = shared.ring(0);
      // Until the kernel has given up twice.
      while (now() < 2 * kTimeoutNs + kTimeoutNs / 2) relax();
      ProxyCommand command;
      while (offsets.size() < 5) {
        if (!ring.take(command)) {
          relax();
          continue;
        }
        offsets.push_back(command.sourceOffset);
        ring.publishTaken();
        Shared::published();
      }
    });
    const auto report = world.run();
    ASSERT_TRUE(report.ok) << "seed " << seed << ": " << report.problem;
    EXPECT_EQ(late, 2u);
    EXPECT_EQ(done, 6u);
    EXPECT_EQ(offsets, (std::vector<uint64_t>{0, 1, 2, 3, 9}));
    ASSERT_EQ(racesReported(), races) << "seed " << seed;
  }
}

// All waits for a ring that ends, end: for a slot, a command, all commands and a signal.
TEST(Proxy, TheEndOfARingEndsItsWaits) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Shared shared(2, 4);
    World world({.seed = seed});
    std::vector<ProxyResult> results(4, ProxyResult::kLate);
    ProxyResult first = ProxyResult::kLate;
    world.launch(0, 0, "wait", {4}, {1}, 0, [&] {
      const unsigned kind = blockIdx.x;
      if (kind == 0) {
        ProxyTicket ticket = put(shared.view, 0, {});
        first = awaitCommand(shared.view, 0, ticket.number);
        while (ticket.result == ProxyResult::kDone) ticket = put(shared.view, 0, {});
        results[0] = ticket.result;
      } else if (kind == 1) {
        results[1] = awaitCommand(shared.view, 0, 1 + 100);
      } else if (kind == 2) {
        const auto ticket = put(shared.view, 0, {});
        results[2] = ticket.result == ProxyResult::kDone ? flush(shared.view, 0) : ticket.result;
      } else {
        results[3] = awaitSignal(shared.view, 0, 1, 1);
      }
    });
    world.host(0, "host", [&] {
      CommandRing ring = shared.ring(0);
      ProxyCommand command;
      for (uint32_t taken = 0; taken < 2;) {
        if (!ring.take(command)) {
          relax();
          continue;
        }
        ++taken;
      }
      ring.complete(2);  // none of the slots is free
      Shared::published();
      for (uint64_t until = now() + 100'000; now() < until;) relax();
      ring.end(ProxyEnd::kPeerLost);
      Shared::published();
    });
    const auto report = world.run();
    ASSERT_TRUE(report.ok) << "seed " << seed << ": " << report.problem;
    EXPECT_EQ(first, ProxyResult::kDone) << "seed " << seed;
    EXPECT_EQ(results[0], ProxyResult::kEnded) << "seed " << seed;
    EXPECT_EQ(results[1], ProxyResult::kEnded) << "seed " << seed;
    EXPECT_NE(results[2], ProxyResult::kLate) << "seed " << seed;
    EXPECT_EQ(results[3], ProxyResult::kEnded) << "seed " << seed;
    EXPECT_LT(report.virtualNs, kTimeoutNs) << "seed " << seed;
  }
}

// Commands that had completed before the ring ended count as completed.
TEST(Proxy, CompletedCommandsStayCompleted) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Shared shared(1, 4);
    World world({.seed = seed, .switchOneIn = 2});
    std::vector<ProxyResult> results(8, ProxyResult::kLate);
    world.launch(0, 0, "wait", {8}, {1}, 0,
                 [&] { results[blockIdx.x] = awaitCommand(shared.view, 0, 0); });
    world.host(0, "host", [&] {
      CommandRing ring = shared.ring(0);
      for (uint64_t until = now() + 1 + seed * 500; now() < until;) relax();
      ring.complete(1);
      ring.end(ProxyEnd::kClosed);
      Shared::published();
    });
    ASSERT_TRUE(world.run().ok);
    for (const auto result : results) EXPECT_EQ(result, ProxyResult::kDone) << "seed " << seed;
  }
}

// The signal's word orders the data that came before it.
TEST(Proxy, ASignalAnnouncesData) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Shared shared(2, 4);
    World world({.seed = seed});
    uint64_t data = 0, seen = 0;
    ProxyResult result = ProxyResult::kLate;
    world.launch(0, 0, "wait", {1}, {1}, 0, [&] {
      result = awaitSignal(shared.view, 1, 1, 3);
      seen = data;
    });
    world.host(0, "wire", [&] {
      data = 42;
      for (uint64_t stamp = 1; stamp <= 3; ++stamp)
        storeReleaseSystem(&shared.signals[kSignalWords + 1], stamp);
    });
    const auto report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    EXPECT_EQ(result, ProxyResult::kDone);
    EXPECT_EQ(seen, 42u);
    ASSERT_EQ(racesReported(), races) << "seed " << seed;
  }
}

// A wait reads memory of the host by the clock, not in each turn: each read crosses the bus.
TEST(Proxy, AWaitReadsTheHostsMemorySeldom) {
  Shared shared(1, 4);
  World world({.seed = 1});
  world.own(0, shared.counts.data(), sizeof(ProxyCounts), simt::MemoryOwner::kHost);
  ProxyResult result = ProxyResult::kDone;
  uint32_t word = 0;
  shared.view.timeoutNs = 20 * kProxyLookNs;
  world.launch(0, 0, "wait", {1}, {1}, 0, [&] { result = awaitCommand(shared.view, 0, 0); });
  world.host(0, "clock", [&] {
    // Each store wakes the waiting thread, and lets it look again.
    for (uint32_t turn = 0; turn < 2000; ++turn) storeRelaxedSystem(&word, turn);
  });
  ASSERT_TRUE(world.run().ok);
  EXPECT_EQ(result, ProxyResult::kLate);
  EXPECT_LE(world.traffic(0).hostWords, 2 * 22u);
}

}  // namespace
}  // namespace mooncake::kernels
