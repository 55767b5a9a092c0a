// Counts the messages with which the ranks of a job leave it, without torch. The ranks are forked
// processes of this host, and leave at once after a barrier.
//
//   scale_bench RANKS WIRE destroy|end [LATE_MS [VICTIM]]
//       destroy: as destroy_process_group() does; end: as a program that ends without it.
//       LATE_MS: rank 0 leaves this much later. VICTIM: this rank is killed as it leaves.
//       Prints one line of JSON. `sent` and `bytes` are per rank that survives, `most` is of one
//       rank. `accused` counts ranks that another rank took for dead, `outvoted` ranks that took
//       themselves for a minority. `seconds` is the time until the last rank has left.
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "cpp/forked_ranks.h"
#include "engine/engine.h"
#include "group/barrier.h"
#include "group/group.h"

namespace mooncake {
namespace {

constexpr int kMostRanks = 512;
constexpr size_t kMostPart = 4096;
constexpr auto kPatience = std::chrono::seconds(120);

struct Row {
  uint64_t sent, bytes;
  int accused;
  bool isOutvoted, hasLeft;
  int64_t nanoseconds;  // from the start of all until this rank has left
};

struct Scene {
  std::atomic<int> met;  // ranks that have published their part
  std::atomic<int> ready;
  std::atomic<bool> go;
  std::atomic<int64_t> startedAt;
  std::array<size_t, kMostRanks> partBytes;
  std::array<std::array<std::byte, kMostPart>, kMostRanks> parts;
  std::array<Row, kMostRanks> rows;
};

struct Plan {
  int ranks;
  std::string wire;
  bool destroys;
  std::chrono::milliseconds late;
  int victim;
};

template <typename T>
T orDie(Result<T> result) {
  if (result.ok()) return std::move(*result);
  std::fprintf(stderr, "%s\n", result.error().message.c_str());
  std::_Exit(1);
}
void orDie(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.error().message.c_str());
  std::_Exit(1);
}

template <typename Condition>
void await(Condition&& condition) {
  const Deadline deadline = Deadline::after(kPatience);
  while (!condition()) {
    if (deadline.passed()) orDie(Status(ErrorCode::kTimeout, "a rank did not come"));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

int64_t now() { return Clock::now().time_since_epoch().count(); }

std::vector<Bytes> meet(Scene& scene, const Plan& plan, int rank, const Bytes& mine) {
  if (mine.size() > kMostPart) orDie(Status(ErrorCode::kExhausted, "a part is too large"));
  std::ranges::copy(mine, scene.parts[size_t(rank)].begin());
  scene.partBytes[size_t(rank)] = mine.size();
  ++scene.met;
  await([&] { return scene.met == plan.ranks; });
  std::vector<Bytes> all;
  for (int r = 0; r < plan.ranks; ++r) {
    const auto* part = scene.parts[size_t(r)].data();
    all.emplace_back(part, part + scene.partBytes[size_t(r)]);
  }
  return all;
}

void runRank(Scene& scene, const Plan& plan, int rank) {
  EngineOptions options{.env = orDie(EngineEnv::read()),
                        .jobKey = Bytes(32, std::byte{1}),
                        .logName = "rank " + std::to_string(rank),
                        .arenaBytes = size_t(1) << 30};
  options.env.transports = {plan.wire};
  options.env.hostIp = "127.0.0.1";
  auto engine = orDie(Engine::create(std::move(options)));
  auto group = orDie(Group::create(
      engine, [&](const Result<Bytes>& mine) { return meet(scene, plan, rank, orDie(mine)); },
      {.name = "all", .rank = rank, .size = plan.ranks, .env = orDie(GroupEnv::read())},
      Deadline::after(kPatience)));
  const auto membership = group->membership();
  ++scene.ready;
  await([&] { return scene.go.load(); });

  const EngineCounters before = engine->counters();
  orDie(barrier(*group, Deadline::after(kPatience)));
  if (rank == 0) std::this_thread::sleep_for(plan.late);
  if (rank == plan.victim) ::raise(SIGKILL);
  const Deadline budget = Deadline::after(engine->env().failureTimeout);
  if (plan.destroys) {
    group->leave(budget);
  } else {
    group->awaitEnded(budget);
  }
  Row& row = scene.rows[size_t(rank)];
  row.isOutvoted = !membership->standing().ok();
  row.accused = int(membership->accusations().size());
  membership->leave();
  engine->leave({plan.destroys ? Farewell::How::kDestroyed : Farewell::How::kEnded, ""});
  const EngineCounters after = engine->counters();
  row.nanoseconds = now() - scene.startedAt;
  row.sent = after.messages - before.messages;
  row.bytes = after.messageBytes - before.messageBytes;
  row.hasLeft = true;
  group.reset();
}

int run(const Plan& plan) {
  const test::SharedWithChildren<Scene> scene;
  std::vector<test::ForkedChild> children;
  for (int r = 0; r < plan.ranks; ++r) children.emplace_back([&, r] { runRank(*scene, plan, r); });
  const auto hasFailed = [](const test::ForkedChild& child) {
    return child.hasEnded() && !WIFSIGNALED(child.status()) && WEXITSTATUS(child.status()) != 0;
  };
  const auto look = [&] {
    for (auto& child : children) (void)child.look();
    return std::ranges::any_of(children, hasFailed);
  };
  await([&] { return look() || scene->ready == plan.ranks; });
  scene->startedAt = now();
  scene->go = true;
  await([&] {
    return look() || std::ranges::all_of(children, [](auto& child) { return child.hasEnded(); });
  });
  Row sum{}, most{};
  int left = 0, outvoted = 0;
  for (int r = 0; r < plan.ranks; ++r) {
    const Row& row = scene->rows[size_t(r)];
    if (!row.hasLeft) continue;
    ++left;
    sum.sent += row.sent;
    sum.bytes += row.bytes;
    sum.accused += row.accused;
    outvoted += row.isOutvoted;
    most.sent = std::max(most.sent, row.sent);
    most.nanoseconds = std::max(most.nanoseconds, row.nanoseconds);
  }
  std::printf(
      "{\"ranks\": %d, \"wire\": \"%s\", \"how\": \"%s\", \"left\": %d, \"sent\": %.1f, "
      "\"most\": %llu, \"bytes\": %.0f, \"accused\": %d, \"outvoted\": %d, \"seconds\": %.2f}\n",
      plan.ranks, plan.wire.c_str(), plan.destroys ? "destroy" : "end", left,
      double(sum.sent) / std::max(left, 1), static_cast<unsigned long long>(most.sent),
      double(sum.bytes) / std::max(left, 1), sum.accused, outvoted, double(most.nanoseconds) / 1e9);
  return 0;
}

}  // namespace
}  // namespace mooncake

int main(int count, char** arguments) {
  const int ranks = count < 4 ? 0 : std::atoi(arguments[1]);
  if (ranks < 1 || ranks > mooncake::kMostRanks) {
    std::fprintf(stderr, "scale_bench RANKS WIRE destroy|end [LATE_MS [VICTIM]]\n");
    return 2;
  }
  return mooncake::run({.ranks = ranks,
                        .wire = arguments[2],
                        .destroys = std::string_view(arguments[3]) == "destroy",
                        .late = std::chrono::milliseconds(count > 4 ? std::atoi(arguments[4]) : 0),
                        .victim = count > 5 ? std::atoi(arguments[5]) : -1});
}
