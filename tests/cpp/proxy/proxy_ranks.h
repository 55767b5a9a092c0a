#pragma once

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "engine_side.h"
#include "kernels/proxy/proxy.cuh"
#include "loopback_cards.h"
#include "proxy/proxy.h"
#include "tests/simt/world.h"

namespace mooncake::proxy {

using mooncake::testing::eventually;
using mooncake::testing::pattern;

constexpr size_t kRegionBytes = size_t(1) << 20;

// A rank with two regions: commands read the first one, and write to the second one of a peer.
struct ProxyRank {
  explicit ProxyRank(const std::string& wire, uint64_t seed = 1)
      : source(kRegionBytes), target(kRegionBytes) {
    const test::LoopbackCards cards({wire});
    EngineOptions options{.jobKey = Bytes(32, std::byte{1}),
                          .logName = "test",
                          .arenaBytes = size_t(1) << 30,
                          .peersReturn = true};
    options.env.transports = {wire};
    options.env.hostIp = "127.0.0.1";
    options.env.simSeed = seed;
    auto made = Engine::create(std::move(options));
    EXPECT_TRUE(made.ok()) << made.error().message;
    if (made.ok()) engine = *made;
  }
  void create(ProxyOptions options) {
    auto made = Proxy::create(engine, {{std::span(source), {}}, {std::span(target), {}}}, options);
    ASSERT_TRUE(made.ok()) << made.error().message;
    proxy = std::move(*made);
  }
  std::shared_ptr<Peer> open(ByteView endpoint, const std::string& name) const {
    auto opened = engine->open(endpoint, name, Deadline::after(std::chrono::seconds(20)));
    EXPECT_TRUE(opened.ok()) << opened.error().message;
    return opened.ok() ? *opened : nullptr;
  }

  Bytes source, target;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<Proxy> proxy;
};

// Ranks in this process. Rank 0 pushes commands to the others, which only take them.
inline std::vector<std::unique_ptr<ProxyRank>> makeRanks(const std::string& wire, uint32_t count,
                                                         ProxyOptions options, uint64_t seed = 1) {
  std::vector<std::unique_ptr<ProxyRank>> ranks;
  std::vector<std::shared_ptr<Peer>> peers;
  std::vector<Bytes> descriptions;
  for (uint32_t rank = 0; rank < count; ++rank) {
    ranks.push_back(std::make_unique<ProxyRank>(wire, seed + rank));
    options.rank = rank;
    options.ranks = count;
    ranks.back()->create(options);
    descriptions.push_back(ranks.back()->proxy->describe());
    peers.push_back(rank == 0 ? nullptr
                              : ranks[0]->open(ranks.back()->engine->endpoint(),
                                               "rank " + std::to_string(rank)));
  }
  const Status attached = ranks[0]->proxy->attach(peers, descriptions);
  EXPECT_TRUE(attached.ok()) << attached.error().message;
  return ranks;
}

// Runs a kernel in the emulator, in real time.
inline void runKernel(unsigned blocks, unsigned threads, std::function<void()> body,
                      uint64_t seed = 1) {
  simt::World world({.seed = seed, .realTime = true});
  world.launch(0, 0, "kernel", {blocks}, {threads}, 0, std::move(body));
  const auto report = world.run();
  EXPECT_TRUE(report.ok) << report.problem;
}

inline size_t threadsNamed(const std::string& name) {
  size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string found;
    std::ifstream(task.path() / "comm") >> found;
    count += found == name;
  }
  return count;
}

}  // namespace mooncake::proxy
