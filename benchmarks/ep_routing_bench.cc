// Measures the routing of a dispatch on one rank: the time before any row moves, without waits for
// other ranks.
//
//   ep_routing_bench RANKS RANKS_PER_HOST EXPERTS [TOKENS [TOPK]]
//       Random tables, FP8 rows of 7168 channels. Prints microseconds, the best of many runs: lists
//       of tokens by host and rank, tables for the others, decoding theirs, reading them, the plan
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "ep/hosts.h"
#include "ep/layout.h"
#include "ep/route_index.h"
#include "ep/shared_rows.h"
#include "ep/token_lists.h"

namespace mooncake::ep {
namespace {

constexpr size_t kHidden = 7168;
constexpr int kUs = 0;

struct Arrival {
  size_t row;  // offset of the row
  uint32_t expert, place;
};

class Routing {
 public:
  static constexpr std::array kSteps = {"tokens", "encode", "decode", "read", "plan"};

  Routing(const Hosts& hosts, const Shape& shape, size_t topk)
      : hosts_(hosts), shape_(shape), topk_(topk), experts_(shape.numExperts, shape.numRanks) {
    std::mt19937 random(1);
    std::vector<int32_t> all(size_t(shape.numExperts));
    std::iota(all.begin(), all.end(), 0);
    for (int r = 0; r < shape.numRanks; ++r) {
      ranks_.push_back(r);
      DispatchTable table{.tokens = uint32_t(shape.maxTokens),
                          .topk = uint32_t(topk),
                          .packedRows = uint32_t(shape.maxTokens),
                          .mask = GroupRanks::firstRanks(shape.numRanks)};
      for (size_t t = 0; t < shape.maxTokens; ++t)
        std::ranges::sample(all, std::back_inserter(table.experts), ptrdiff_t(topk), random);
      if (r == kUs) ours_ = table;
      published_.push_back(table.encode(shape.numExperts));
    }
  }

  // Microseconds of each step.
  std::array<double, kSteps.size()> run() {
    std::array<double, kSteps.size()> took{};
    auto since = std::chrono::steady_clock::now();
    size_t step = 0;
    const auto endStep = [&] {
      const auto now = std::chrono::steady_clock::now();
      took[step++] = std::chrono::duration<double, std::micro>(now - since).count();
      since = now;
    };
    const SharedRows shared(hosts_, ranks_, shape_.maxTokens * kRowBytes, kInlineRows);
    const HostTable& table = shared.table();
    const TokenLists byHost(ours_.experts, topk_, hostsOfExperts(experts_, table), table.size());
    const TokenLists byRank(ours_.experts, topk_, experts_.owners(), ranks_.size());
    for (size_t h = 0; h < table.size(); ++h) {
      if (int(h) == table.indexOf(kUs)) continue;
      checked_ += byHost.of(h).size();
      checked_ += shared.pushed(kUs, table.hosts()[h])->offset;
    }
    endStep();

    const Bytes encoded = ours_.encode(shape_.numExperts);
    payload_.resize(encoded.size());
    for (const int r : ranks_) {
      if (table.indexOf(r) == table.indexOf(kUs)) continue;
      std::ranges::copy(encoded, payload_.begin());
      DispatchTable::setRows(payload_, RowsAt::kPushed, uint32_t(byRank.of(size_t(r)).size()), 0);
    }
    endStep();

    std::vector<DispatchTable> tables;
    for (const Bytes& one : published_) {
      uint32_t length = 0;
      std::memcpy(&length, one.data(), sizeof(length));
      const Bytes copy(one.begin() + sizeof(length), one.begin() + length);
      auto decoded = DispatchTable::decode(copy, shape_);
      if (!decoded.ok()) std::exit(1);
      tables.push_back(std::move(*decoded));
    }
    GroupRanks participants = GroupRanks::firstRanks(shape_.numRanks);
    for (const DispatchTable& one : tables) participants &= one.mask;
    endStep();

    RouteIndex routes(experts_, &table, kUs);
    const auto& ourHost = shared.hostOf(kUs);
    const int ours = table.indexOf(kUs);
    bool areAnyShared = false;
    std::vector<size_t> landed(ranks_.size());  // offset of the rows; 0: not packed
    std::vector<bool> isForHost(ranks_.size());
    for (const int r : ranks_) {
      const DispatchTable& one = tables[size_t(r)];
      routes.read(r, one.experts, one.topk);
      for (int h = 0; !areAnyShared && h < int(table.size()); ++h) {
        areAnyShared = h != table.indexOf(r) && participants.contains(r) &&
                       shared.isShared(table.hosts()[size_t(h)], routes.tokensFor(size_t(h)));
      }
      isForHost[size_t(r)] =
          table.indexOf(r) != ours && shared.isShared(ourHost, routes.tokensFor(size_t(ours)));
      if (table.indexOf(r) != ours) landed[size_t(r)] = shared.pushed(r, ourHost)->offset;
    }
    endStep();

    std::vector<uint32_t> next(experts_.numLocal(kUs));
    arrivals_.clear();
    for (const int r : ranks_) {
      for (const auto& [token, expert, inHost, inRank] : routes.choicesOf(r)) {
        const size_t index = !landed[size_t(r)] ? token : isForHost[size_t(r)] ? inHost : inRank;
        arrivals_.push_back({landed[size_t(r)] + index * kRowBytes, expert, next[expert]++});
      }
    }
    checked_ += arrivals_.size() + areAnyShared;
    endStep();
    return took;
  }

  size_t checked() const { return checked_; }

 private:
  static inline const size_t kRowBytes = dispatchRowBytes(kHidden, RowFormat::kFp8);
  static inline const size_t kInlineRows = (64 << 10) / kRowBytes;

  const Hosts& hosts_;
  const Shape shape_;
  const size_t topk_;
  const ExpertMap experts_;
  std::vector<int> ranks_;
  DispatchTable ours_;
  std::vector<Bytes> published_;  // by rank
  Bytes payload_;
  std::vector<Arrival> arrivals_;
  size_t checked_ = 0;  // keeps the compiler from dropping the work
};

int run(int argc, char** argv) {
  const auto argument = [&](int i, int otherwise) {
    return argc > i ? std::atoi(argv[i]) : otherwise;
  };
  const int numRanks = argument(1, 0), perHost = argument(2, 0), numExperts = argument(3, 0);
  const int tokens = argument(4, 128), topk = argument(5, 8);
  if (numRanks < 1 || perHost < 1 || topk < 1 || tokens < 1 || numExperts < topk) {
    std::fprintf(stderr, "ep_routing_bench RANKS RANKS_PER_HOST EXPERTS [TOKENS [TOPK]]\n");
    return 2;
  }
  std::vector<Hosts::Memory> memories;
  for (int r = 0; r < numRanks; ++r) {
    GroupRanks host;
    const int first = r / perHost * perHost;
    for (int other = first; other < std::min(first + perHost, numRanks); ++other) host.add(other);
    memories.push_back({.mapped = host, .sendBytes = uint64_t(1) << 40});
  }
  const Hosts hosts(std::move(memories));
  const Shape shape{.numRanks = numRanks,
                    .numExperts = numExperts,
                    .maxTokens = size_t(tokens),
                    .hidden = kHidden};
  Routing routing(hosts, shape, size_t(topk));
  double best = 0;
  std::array<double, Routing::kSteps.size()> steps{};
  for (int i = 0; i < 200; ++i) {
    const auto took = routing.run();
    const double total = std::accumulate(took.begin(), took.end(), 0.0);
    if (i > 0 && best <= total) continue;
    best = total;
    steps = took;
  }
  std::printf("%4d ranks, %3d a host, %3d experts, %d tokens, top-%d: %8.1f us", numRanks, perHost,
              numExperts, tokens, topk, best);
  for (size_t s = 0; s < steps.size(); ++s) std::printf("  %s %.1f", Routing::kSteps[s], steps[s]);
  std::printf("  (%zu)\n", routing.checked());
  return 0;
}

}  // namespace
}  // namespace mooncake::ep

int main(int argc, char** argv) { return mooncake::ep::run(argc, argv); }
