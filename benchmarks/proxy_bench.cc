// Measures commands that kernels push to a proxy (docs/proxy.md). The emulator runs the kernels on a
// thread of the host; all ranks live in this process. Prints JSON lines.
//
//   proxy_bench queue SECONDS               commands a second through the ring alone
//   proxy_bench commands WIRE BYTES SECONDS ROUNDS
//       by a bare loop of writes, and by the proxy with 1 and 4 producers, in turns
//   proxy_bench blocking WIRE BYTES SECONDS  put and flush one by one, and flush at the end
//   proxy_bench latency WIRE BYTES COUNT     until a command has completed
//   proxy_bench send WIRE BYTES COUNT        a command with a signal there, and one back
//   proxy_bench idle WIRE SECONDS            percent of a core, of two ranks without commands
//   proxy_bench all-to-all WIRE RANKS BYTES SECONDS
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <sched.h>
#include <string>
#include <thread>
#include <vector>

#include "kernels/proxy/proxy.cuh"
#include "proxy/proxy.h"
#include "tests/simt/world.h"

namespace mooncake::proxy {
namespace {

using kernels::kNoSignal;
using kernels::ProxyResult;
using kernels::ProxyView;

constexpr size_t kRegion = size_t(4) << 20;
constexpr size_t kOffset = 64;  // puts keep off the doorbell at a region's start

template <typename T>
T orDie(Result<T> result) {
  if (result.ok()) return std::move(*result);
  std::fprintf(stderr, "%s\n", result.error().message.c_str());
  std::exit(1);
}
void orDie(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.error().message.c_str());
  std::exit(1);
}
void require(bool isTrue, const char* what) {
  if (isTrue) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

double secondsSince(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

struct Rank {
  std::shared_ptr<Engine> engine;
  Bytes source = Bytes(kRegion), target = Bytes(kRegion);
  std::unique_ptr<Proxy> proxy;
  std::vector<std::shared_ptr<Peer>> peers;
};

std::vector<std::unique_ptr<Rank>> makeRanks(const std::string& wire, uint32_t count) {
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Bytes> descriptions;
  for (uint32_t i = 0; i < count; ++i) {
    EngineOptions options{.env = orDie(EngineEnv::read()),
                          .jobKey = Bytes(32, std::byte{1}),
                          .logName = "bench",
                          .peersReturn = true};
    options.env.transports = {wire};
    options.env.hostIp = "127.0.0.1";
    auto rank = std::make_unique<Rank>();
    rank->engine = orDie(Engine::create(std::move(options)));
    rank->proxy = orDie(
        Proxy::create(rank->engine, {{std::span(rank->source), {}}, {std::span(rank->target), {}}},
                      {.rank = i, .ranks = count}));
    descriptions.push_back(rank->proxy->describe());
    ranks.push_back(std::move(rank));
  }
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t j = 0; j < count; ++j) {
      ranks[i]->peers.push_back(i == j
                                    ? nullptr
                                    : orDie(ranks[i]->engine->open(
                                          ranks[j]->engine->endpoint(), "rank " + std::to_string(j),
                                          Deadline::after(std::chrono::seconds(10)))));
    }
    orDie(ranks[i]->proxy->attach(ranks[i]->peers, descriptions));
  }
  return ranks;
}

void runKernel(unsigned blocks, std::function<void()> body) {
  simt::World world({.seed = 1, .switchOneIn = 64, .starveFor = 0, .realTime = true});
  world.launch(0, 0, "kernel", {blocks}, {1}, 0, std::move(body));
  const auto report = world.run();
  require(report.ok, report.problem.c_str());
}

kernels::ProxyPut command(uint64_t bytes, uint32_t signal = kNoSignal) {
  return {0, 1, kOffset, kOffset, bytes, signal};
}

double percentile(std::vector<double>& values, double part) {
  std::ranges::sort(values);
  return values[size_t(part * double(values.size() - 1))];
}

// ---- the ring alone

// A GPU that waits for free slots takes no time of the host's cores. So does the emulator here.
void sleepWhileFull(const ProxyView& view, uint32_t peer) {
  constexpr uint32_t kBurst = 64;
  const auto waiting = [&] {
    return kernels::loadRelaxedDevice(&view.tickets[peer].reserved) -
           kernels::loadRelaxedSystem(&view.counts[peer].taken);
  };
  while (waiting() + 4 * kBurst > view.slots)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

int queue(double seconds) {
  const auto memory = orDie(ProxyMemory::create(nullptr, 1, 1024, 1, {}, {}));
  ProxyView view = memory->view();
  view.timeoutNs = 10'000'000'000;
  for (const unsigned producers : {1u, 4u}) {
    std::atomic<bool> isOver{false};
    std::atomic<uint64_t> taken{0};
    CommandRing ring = memory->ringOf(0);
    std::thread taker([&] {
      kernels::ProxyCommand one;
      while (!isOver) {
        uint32_t lot = 0;
        while (ring.take(one)) ++lot;
        if (lot == 0) {
          ::sched_yield();
          continue;
        }
        ring.publishTaken();
        ring.complete(lot);
        taken += lot;
      }
    });
    const auto began = Clock::now();
    runKernel(producers, [&] {
      while (secondsSince(began) < seconds) {
        sleepWhileFull(view, 0);
        for (int i = 0; i < 64; ++i) kernels::put(view, 0, command(64));
      }
      kernels::flush(view, 0);
    });
    const double rate = double(taken) / secondsSince(began);
    isOver = true;
    taker.join();
    std::printf("{\"queue\": \"pinned\", \"producers\": %u, \"per_s\": %.0f}\n", producers, rate);
  }
  return 0;
}

// ---- commands a second

double bareLoop(Rank& rank, uint64_t bytes, double seconds, const RemoteRegion& there) {
  Channel& channel = *rank.peers[1]->channel;
  static Doorbell bell;  // outlives the channel
  std::deque<Completion> flights;
  for (size_t i = 0; i < PeerLimits::kMostUnderWay; ++i) flights.emplace_back(&bell);
  std::vector<WriteRequest> writes;
  uint64_t posted = 0, done = 0;
  const auto began = Clock::now();
  const auto at = [&](uint64_t i) -> Completion& { return flights[i % flights.size()]; };
  for (bool isOver = false; !isOver || done < posted;) {
    const uint64_t before = done;
    while (done < posted && at(done).finished()) {
      require(at(done).error.load() == ErrorCode::kOk, "a write failed");
      ++done;
    }
    isOver = isOver || secondsSince(began) > seconds;
    writes.clear();
    for (; !isOver && posted < done + flights.size(); ++posted) {
      writes.push_back({.region = there,
                        .offset = kOffset,
                        .source = std::span(rank.source).subspan(kOffset, bytes),
                        .completion = &at(posted)});
    }
    if (!writes.empty()) orDie(channel.write(std::span<const WriteRequest>(writes)));
    if (writes.empty() && before == done) ::sched_yield();
  }
  return double(done) / secondsSince(began);
}

double byProxy(Rank& rank, uint64_t bytes, double seconds, unsigned producers, bool isBlocking) {
  const ProxyView view = rank.proxy->view();
  const uint32_t first = view.counts[1].completed;
  const auto began = Clock::now();
  runKernel(producers, [&] {
    while (secondsSince(began) < seconds) {
      sleepWhileFull(view, 1);
      for (int i = 0; i < (isBlocking ? 1 : 64); ++i) {
        const auto ticket = kernels::put(view, 1, command(bytes));
        require(ticket.result == ProxyResult::kDone, "a put failed");
      }
      if (isBlocking) require(kernels::flush(view, 1) == ProxyResult::kDone, "a flush failed");
    }
    require(kernels::flush(view, 1) == ProxyResult::kDone, "a flush failed");
  });
  return double(view.counts[1].completed - first) / secondsSince(began);
}

int commands(const std::string& wire, uint64_t bytes, double seconds, int rounds) {
  auto ranks = makeRanks(wire, 2);
  const auto there = orDie(Regions::decode(ranks[1]->proxy->describe(), "rank 1"));
  for (int round = -1; round < rounds; ++round) {
    const double bare = bareLoop(*ranks[0], bytes, seconds, there.regions[1].remote);
    const double one = byProxy(*ranks[0], bytes, seconds, 1, false);
    const double four = byProxy(*ranks[0], bytes, seconds, 4, false);
    if (round < 0) continue;  // connections warm up
    std::printf("{\"bytes\": %lu, \"bare\": %.0f, \"one\": %.0f, \"four\": %.0f}\n", bytes, bare,
                one, four);
  }
  return 0;
}

int blocking(const std::string& wire, uint64_t bytes, double seconds) {
  auto ranks = makeRanks(wire, 2);
  byProxy(*ranks[0], bytes, 0.1, 1, false);
  const double apart = byProxy(*ranks[0], bytes, seconds, 1, true);
  const double together = byProxy(*ranks[0], bytes, seconds, 1, false);
  std::printf("{\"bytes\": %lu, \"blocking\": %.0f, \"non_blocking\": %.0f}\n", bytes, apart,
              together);
  return 0;
}

// ---- latency

void printLatency(const char* what, uint64_t bytes, std::vector<double>& us) {
  std::printf("{\"what\": \"%s\", \"bytes\": %lu, \"p50_us\": %.1f, \"p99_us\": %.1f}\n", what,
              bytes, percentile(us, 0.5), percentile(us, 0.99));
}

int latency(const std::string& wire, uint64_t bytes, int count) {
  auto ranks = makeRanks(wire, 2);
  const ProxyView view = ranks[0]->proxy->view();
  for (const uint32_t signal : {kNoSignal, 0u}) {
    std::vector<double> us;
    runKernel(1, [&] {
      for (int i = 0; i < count; ++i) {
        const auto began = Clock::now();
        const auto ticket = kernels::put(view, 1, command(bytes, signal));
        require(kernels::awaitCommand(view, 1, ticket.number) == ProxyResult::kDone, "lost");
        us.push_back(secondsSince(began) * 1e6);
      }
    });
    printLatency(signal == kNoSignal ? "write" : "write with a signal", bytes, us);
  }
  return 0;
}

int send(const std::string& wire, uint64_t bytes, int count) {
  auto ranks = makeRanks(wire, 2);
  std::vector<double> us;
  const auto play = [&](uint32_t rank) {
    const ProxyView view = ranks[rank]->proxy->view();
    runKernel(1, [&, rank] {
      for (int i = 1; i <= count; ++i) {
        const auto began = Clock::now();
        if (rank == 0) kernels::put(view, 1, command(bytes, 0));
        require(kernels::awaitSignal(view, 1 - rank, 0, uint64_t(i)) == ProxyResult::kDone, "lost");
        if (rank == 1) kernels::put(view, 0, command(bytes, 0));
        if (rank == 0) us.push_back(secondsSince(began) * 1e6 / 2);
      }
      require(kernels::flush(view, 1 - rank) == ProxyResult::kDone, "lost");
    });
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
  printLatency("send and receive, one way", bytes, us);
  return 0;
}

double cpuSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

int idle(const std::string& wire, double seconds) {
  const auto ranks = makeRanks(wire, 2);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const double before = cpuSeconds();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  std::printf("{\"percent\": %.2f}\n", 100 * (cpuSeconds() - before) / seconds);
  return 0;
}

int allToAll(const std::string& wire, uint32_t count, uint64_t bytes, double seconds) {
  auto ranks = makeRanks(wire, count);
  std::atomic<uint64_t> rounds{0};
  std::vector<std::thread> threads;
  const auto began = Clock::now();
  for (uint32_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      const ProxyView view = ranks[rank]->proxy->view();
      runKernel(1, [&, rank] {
        while (secondsSince(began) < seconds) {
          for (uint32_t i = 1; i < count; ++i)
            kernels::put(view, (rank + i) % count, command(bytes));
          for (uint32_t i = 1; i < count; ++i) {
            const auto result = kernels::flush(view, (rank + i) % count);
            require(result == ProxyResult::kDone, "lost");
          }
          ++rounds;
        }
      });
    });
  }
  for (auto& thread : threads) thread.join();
  const double moved = double(rounds * (count - 1) * bytes);
  std::printf("{\"ranks\": %u, \"bytes\": %lu, \"bytes_per_s\": %.0f}\n", count, bytes,
              moved / secondsSince(began));
  return 0;
}

}  // namespace
}  // namespace mooncake::proxy

int main(int count, char** words) {
  using namespace mooncake::proxy;
  const std::string what = count > 1 ? words[1] : "";
  const auto number = [&](int i) { return std::strtoull(words[i], nullptr, 10); };
  if (what == "queue" && count == 3) return queue(std::atof(words[2]));
  if (what == "commands" && count == 6)
    return commands(words[2], number(3), std::atof(words[4]), int(number(5)));
  if (what == "blocking" && count == 5) return blocking(words[2], number(3), std::atof(words[4]));
  if (what == "latency" && count == 5) return latency(words[2], number(3), int(number(4)));
  if (what == "send" && count == 5) return send(words[2], number(3), int(number(4)));
  if (what == "idle" && count == 4) return idle(words[2], std::atof(words[3]));
  if (what == "all-to-all" && count == 6)
    return allToAll(words[2], uint32_t(number(3)), number(4), std::atof(words[5]));
  std::fprintf(stderr, "see the top of proxy_bench.cc\n");
  return 2;
}
