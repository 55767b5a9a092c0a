// Every verb on every wire, with ranks as threads, so that the sanitizers see all of them.
#include "collectives/collectives.h"

#include <atomic>
#include <cstring>
#include <gtest/gtest.h>
#include <latch>
#include <random>

#include "collectives/point_to_point.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

constexpr size_t kEager = 8 << 10;  // small enough that both paths run with little data

struct Wire {
  const char* name;
  std::vector<std::string> transports;
  bool crossMemoryAttach = true;
};

class CollectivesTest : public testing::TestWithParam<std::tuple<Wire, int>> {
 protected:
  Ranks ranks() const {
    const auto& [wire, size] = GetParam();
    return {.size = size,
            .transports = wire.transports,
            .crossMemoryAttach = wire.crossMemoryAttach,
            .eagerBytes = kEager};
  }
};

template <typename T>
std::span<std::byte> bytesOf(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

// Whole numbers, so that every order of summation gives the same float.
std::vector<float> inputOf(int rank, size_t count, int salt = 0) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i)
    values[i] = float((i * 7 + size_t(rank) * 13 + size_t(salt)) % 101);
  return values;
}

const std::vector<size_t> kCounts = {0, 1, 3, 1000, 2048, 2049, 5000, 70001};
constexpr Reduction kFloatSum{DType::kFloat32, ReduceKind::kSum};

void expectOk(const Status& status) { EXPECT_TRUE(status.ok()) << status.error().message; }

TEST_P(CollectivesTest, AllreduceSums) {
  runRanks(ranks(), [](Group& group) {
    for (const size_t count : kCounts) {
      std::vector<float> expected(count);
      for (int r = 0; r < group.size(); ++r) {
        const auto input = inputOf(r, count);
        for (size_t i = 0; i < count; ++i) expected[i] += input[i];
      }
      auto data = inputOf(group.rank(), count);
      expectOk(allreduce(group, bytesOf(data), kFloatSum, soon()));
      EXPECT_EQ(data, expected) << count;
    }
  });
}

TEST_P(CollectivesTest, BroadcastFromEveryRoot) {
  runRanks(ranks(), [](Group& group) {
    for (const size_t count : kCounts) {
      for (int root = 0; root < group.size(); ++root) {
        auto data = inputOf(group.rank(), count);
        expectOk(broadcast(group, bytesOf(data), DType::kFloat32, root, soon()));
        EXPECT_EQ(data, inputOf(root, count)) << count;
      }
    }
  });
}

TEST_P(CollectivesTest, ReduceChangesOnlyTheRoot) {
  runRanks(ranks(), [](Group& group) {
    for (const size_t count : kCounts) {
      const int root = int(count) % group.size();
      auto data = inputOf(group.rank(), count);
      expectOk(reduce(group, bytesOf(data), kFloatSum, root, soon()));
      std::vector<float> expected = inputOf(group.rank(), count);
      if (group.rank() == root) {
        for (int r = 0; r < group.size(); ++r) {
          const auto input = inputOf(r, count);
          for (size_t i = 0; i < count && r != root; ++i) expected[i] += input[i];
        }
      }
      EXPECT_EQ(data, expected) << count;
    }
  });
}

TEST_P(CollectivesTest, AllgatherAndReduceScatter) {
  runRanks(ranks(), [](Group& group) {
    const size_t size = size_t(group.size());
    for (const size_t count : kCounts) {
      auto input = inputOf(group.rank(), count);
      std::vector<float> gathered(count * size);
      std::vector<Span> parts;
      for (size_t r = 0; r < size; ++r)
        parts.push_back(bytesOf(gathered).subspan(r * count * 4, count * 4));
      expectOk(allgather(group, bytesOf(input), parts, DType::kFloat32, soon()));
      for (size_t r = 0; r < size; ++r) {
        const auto expected = inputOf(int(r), count);
        EXPECT_TRUE(
            std::equal(expected.begin(), expected.end(), gathered.begin() + ptrdiff_t(r * count)))
            << count;
      }
      auto all = inputOf(group.rank(), count * size);
      std::vector<float> mine(count), sum(count);
      expectOk(reduceScatter(group, bytesOf(all), bytesOf(mine), kFloatSum, soon()));
      for (size_t r = 0; r < size; ++r) {
        const auto theirs = inputOf(int(r), count * size);
        for (size_t i = 0; i < count; ++i) sum[i] += theirs[size_t(group.rank()) * count + i];
      }
      EXPECT_EQ(mine, sum) << count;
    }
  });
}

TEST_P(CollectivesTest, GatherAndScatterWithEveryRoot) {
  runRanks(ranks(), [](Group& group) {
    const size_t size = size_t(group.size());
    for (const size_t count : kCounts) {
      for (int root = 0; root < group.size(); ++root) {
        const bool isRoot = group.rank() == root;
        auto input = inputOf(group.rank(), count);
        std::vector<std::vector<float>> out(isRoot ? size : 0, std::vector<float>(count));
        std::vector<Span> outputs;
        for (auto& output : out) outputs.push_back(bytesOf(output));
        expectOk(gather(group, bytesOf(input), outputs, DType::kFloat32, root, soon()));
        EXPECT_EQ(input, inputOf(group.rank(), count));
        for (size_t r = 0; r < out.size(); ++r) EXPECT_EQ(out[r], inputOf(int(r), count)) << count;

        std::vector<std::vector<float>> in;
        for (size_t r = 0; isRoot && r < size; ++r) in.push_back(inputOf(root, count, int(r)));
        std::vector<ConstSpan> inputs;
        for (auto& part : in) inputs.push_back(bytesOf(part));
        std::vector<float> part(count);
        expectOk(scatter(group, inputs, bytesOf(part), DType::kFloat32, root, soon()));
        EXPECT_EQ(part, inputOf(root, count, group.rank())) << count;
      }
    }
  });
}

// Tensors of different lengths and of two types in one operation, below and above a slot's size.
TEST_P(CollectivesTest, SeveralTensorsInOneOperation) {
  runRanks(ranks(), [](Group& group) {
    const size_t size = size_t(group.size());
    const auto wideOf = [](int rank, size_t count) {
      std::vector<double> values;
      for (const float value : inputOf(rank, count)) values.push_back(value);
      return values;
    };
    for (const std::vector<size_t>& counts : std::vector<std::vector<size_t>>{
             {1, 3, 0, 20}, {3000, 1, 9001}, std::vector<size_t>(40, 333)}) {
      const uint64_t before = group.lastNumber;
      std::vector<std::vector<float>> data;
      std::vector<Buffer> buffers;
      for (const size_t count : counts) data.push_back(inputOf(group.rank(), count));
      for (auto& one : data) buffers.push_back({bytesOf(one), DType::kFloat32});
      auto wide = wideOf(group.rank(), 9);
      buffers.push_back({std::as_writable_bytes(std::span(wide)), DType::kFloat64});
      expectOk(allreduce(group, buffers, ReduceKind::kSum, soon()));
      for (size_t i = 0; i < counts.size(); ++i) {
        std::vector<float> expected(counts[i]);
        for (int r = 0; r < group.size(); ++r) {
          const auto theirs = inputOf(r, counts[i]);
          for (size_t at = 0; at < counts[i]; ++at) expected[at] += theirs[at];
        }
        EXPECT_EQ(data[i], expected) << counts[i];
      }
      for (size_t at = 0; at < wide.size(); ++at) {
        double expected = 0;
        for (int r = 0; r < group.size(); ++r) expected += wideOf(r, 9)[at];
        EXPECT_EQ(wide[at], expected);
      }

      std::vector<std::vector<float>> inputs, gathered;
      std::vector<Buffer> given;
      std::vector<Span> taken;
      for (const size_t count : counts) inputs.push_back(inputOf(group.rank(), count));
      for (auto& input : inputs) given.push_back({bytesOf(input), DType::kFloat32});
      for (size_t r = 0; r < size; ++r)
        for (const size_t count : counts) gathered.emplace_back(count);
      for (auto& one : gathered) taken.push_back(bytesOf(one));
      expectOk(allgather(group, given, taken, soon()));
      for (size_t r = 0; r < size; ++r) {
        for (size_t i = 0; i < counts.size(); ++i)
          EXPECT_EQ(gathered[r * counts.size() + i], inputOf(int(r), counts[i])) << counts[i];
      }

      for (const bool inParts : {false, true}) {
        std::vector<std::vector<float>> whole, sums;
        std::vector<Buffer> from, to;
        for (const size_t count : counts) {
          whole.push_back(inputOf(group.rank(), count * size));
          sums.emplace_back(count);
        }
        for (size_t i = 0; i < counts.size(); ++i) {
          const Span all = bytesOf(whole[i]);
          const size_t each = counts[i] * sizeof(float);
          for (size_t r = 0; inParts && r < size; ++r)
            from.push_back({all.subspan(r * each, each), DType::kFloat32});
          if (!inParts) from.push_back({all, DType::kFloat32});
          to.push_back({bytesOf(sums[i]), DType::kFloat32});
        }
        expectOk(reduceScatter(group, from, to, ReduceKind::kSum, soon()));
        for (size_t i = 0; i < counts.size(); ++i) {
          std::vector<float> expected(counts[i]);
          for (int r = 0; r < group.size(); ++r) {
            const auto theirs = inputOf(r, counts[i] * size);
            for (size_t at = 0; at < counts[i]; ++at)
              expected[at] += theirs[size_t(group.rank()) * counts[i] + at];
          }
          EXPECT_EQ(sums[i], expected) << counts[i];
        }
      }
      EXPECT_EQ(group.lastNumber, before + 4);
    }
  });
}

TEST_P(CollectivesTest, TensorsOfOtherLengthsAreAnotherCall) {
  if (ranks().size < 2) GTEST_SKIP() << "one rank always agrees with itself";
  runRanks(ranks(), [](Group& group) {
    // The same number of elements in all.
    auto first = inputOf(group.rank(), group.rank() == 1 ? 30 : 10),
         second = inputOf(0, 40 - first.size());
    const Buffer buffers[] = {{bytesOf(first), DType::kFloat32},
                              {bytesOf(second), DType::kFloat32}};
    const Status status = allreduce(group, buffers, ReduceKind::kSum, soon());
    ASSERT_EQ(status.code(), ErrorCode::kMismatch);
    EXPECT_NE(status.error().message.find("40 elements per rank in 2 tensors"), std::string::npos)
        << status.error().message;
    EXPECT_EQ(first, inputOf(group.rank(), first.size()));
  });
}

// Lengths that differ from pair to pair, some zero, some ranks small and some large.
TEST_P(CollectivesTest, AlltoallWithUnequalSplits) {
  runRanks(ranks(), [](Group& group) {
    const auto length = [](int from, int to, int round) {
      return size_t((from * 5 + to * 3 + round) % 4) * (round % 2 ? 11 : 1500);
    };
    for (int round = 0; round < 6; ++round) {
      std::vector<std::vector<float>> in, out;
      std::vector<ConstSpan> inputs;
      std::vector<Span> outputs;
      for (int r = 0; r < group.size(); ++r) {
        in.push_back(inputOf(group.rank(), length(group.rank(), r, round), r));
        out.emplace_back(length(r, group.rank(), round));
      }
      for (int r = 0; r < group.size(); ++r) {
        inputs.push_back(bytesOf(in[size_t(r)]));
        outputs.push_back(bytesOf(out[size_t(r)]));
      }
      expectOk(alltoall(group, inputs, outputs, DType::kFloat32, soon()));
      for (int r = 0; r < group.size(); ++r) {
        EXPECT_EQ(out[size_t(r)], inputOf(r, length(r, group.rank(), round), group.rank()));
      }
    }
  });
}

TEST_P(CollectivesTest, BarrierHoldsUntilAllHaveCome) {
  std::atomic<int> came{0};
  runRanks(ranks(), [&](Group& group) {
    for (int round = 1; round <= 200; ++round) {
      came.fetch_add(1);
      expectOk(barrier(group, soon()));
      EXPECT_GE(came.load(), round * group.size());
    }
  });
}

// Three ranks, so that one of them has the same call as both of the others.
TEST_P(CollectivesTest, CallsOfCallbacksAndBesideThemAreErrorsEverywhere) {
  if (ranks().size < 3) GTEST_SKIP() << "needs a rank of each kind";
  runRanks(ranks(), [](Group& group) {
    constexpr CalledFrom kPlaces[] = {CalledFrom::kCallback, CalledFrom::kBesideCallbacks,
                                      CalledFrom::kProgram};
    for (const size_t count : kCounts) {
      group.hasMismatched = false;
      auto data = inputOf(group.rank(), count);
      // A callback on some ranks and the program on others go together.
      group.calledFrom = group.rank() == 0 ? CalledFrom::kCallback : CalledFrom::kProgram;
      expectOk(barrier(group, soon()));
      group.calledFrom = kPlaces[group.rank() % 3];
      const Status status = allreduce(group, bytesOf(data), kFloatSum, soon());
      ASSERT_EQ(status.code(), ErrorCode::kMismatch);
      EXPECT_NE(status.error().message.find("called it in a callback"), std::string::npos)
          << status.error().message;
      EXPECT_EQ(data, inputOf(group.rank(), count));
      // The next calls may be shifted, so less is allowed.
      group.calledFrom = group.rank() == 0 ? CalledFrom::kCallback : CalledFrom::kProgram;
      EXPECT_EQ(barrier(group, soon()).code(), ErrorCode::kMismatch);
      group.calledFrom = CalledFrom::kProgram;
      group.callsSinceLoss = group.rank() == 0 ? 2 : 1;
      EXPECT_EQ(barrier(group, soon()).code(), ErrorCode::kMismatch);
      group.callsSinceLoss = 0;
      expectOk(barrier(group, soon()));
    }
  });
}

TEST_P(CollectivesTest, DifferentCallsAreErrorsEverywhereAndTheGroupGoesOn) {
  if (ranks().size < 2) GTEST_SKIP() << "one rank always agrees with itself";
  runRanks(ranks(), [](Group& group) {
    auto data = inputOf(group.rank(), 10);
    const Status status = group.rank() == 1
                              ? broadcast(group, bytesOf(data), DType::kFloat32, 0, soon())
                              : allreduce(group, bytesOf(data), kFloatSum, soon());
    ASSERT_EQ(status.code(), ErrorCode::kMismatch);
    EXPECT_NE(status.error().message.find(
                  "rank 1 called broadcast(float32, 10 elements per rank, root 0)"),
              std::string::npos)
        << status.error().message;
    EXPECT_EQ(data, inputOf(group.rank(), 10));
    std::vector<float> ones(5000, 1);
    expectOk(allreduce(group, bytesOf(ones), kFloatSum, soon()));
    EXPECT_EQ(ones[4999], float(group.size()));
  });
}

TEST_P(CollectivesTest, MessagesInOrderOfTheirTags) {
  if (ranks().size < 2) GTEST_SKIP() << "needs a peer";
  runRanks(ranks(), [](Group& group) {
    PointToPoint messages(group);
    const int to = (group.rank() + 1) % group.size(),
              from = (group.rank() + group.size() - 1) % group.size();
    const std::vector<size_t> counts = {0, 1, 2047, 2048, 2049, 50000, 3};
    std::vector<std::vector<float>> out, in;
    std::vector<std::shared_ptr<Message>> posted;
    for (int round = 0; round < 30; ++round) {
      const size_t count = counts[size_t(round) % counts.size()];
      out.push_back(inputOf(group.rank(), count, round));
      in.emplace_back(count);
    }
    for (int round = 29; round >= 0; --round)
      posted.push_back(messages.receive(bytesOf(in[size_t(round)]), from, uint32_t(round), soon()));
    for (int round = 0; round < 30; ++round)
      posted.push_back(messages.send(bytesOf(out[size_t(round)]), to, uint32_t(round), soon()));
    for (auto& message : posted) {
      ASSERT_TRUE(messages.wait(*message, soon()));
      expectOk(message->status());
    }
    for (int round = 0; round < 30; ++round)
      EXPECT_EQ(in[size_t(round)], inputOf(from, in[size_t(round)].size(), round)) << round;
  });
}

// The ranks leave the group one after the other, and keep their engines. The others go on at once.
TEST_P(CollectivesTest, GoesOnWithoutWhoHasLeft) {
  std::latch allLeft(ranks().size);  // a rank that leaves the group stays in the job
  runRanks(ranks(), [&](Group& group) {
    for (int left = group.size(); left > group.rank(); --left) {
      for (const size_t count : {5, 5000}) {
        auto data = inputOf(group.rank(), count);
        std::vector<float> expected(count);
        for (int r = 0; r < left; ++r) {
          const auto input = inputOf(r, count);
          for (size_t i = 0; i < count; ++i) expected[i] += input[i];
        }
        expectOk(allreduce(group, bytesOf(data), kFloatSum, soon()));
        EXPECT_EQ(data, expected) << left;
        EXPECT_EQ(int(group.lastView->active.size()), left);
        EXPECT_EQ(group.lastView->epoch, 1u);  // no rank is lost
      }
      if (left == group.size()) continue;
      auto data = inputOf(group.rank(), 5);
      const Status status =
          broadcast(group, bytesOf(data), DType::kFloat32, group.size() - 1, soon());
      EXPECT_EQ(status.code(), ErrorCode::kPeerLost);
      EXPECT_NE(status.error().message.find("it has left the group"), std::string::npos)
          << status.error().message;
    }
    group.leave(soon());
    allLeft.arrive_and_wait();
  });
}

// Threads of a rank make groups of the same ranks at once. The groups share one channel to each
// rank.
TEST_P(CollectivesTest, GroupsMadeAtOnceShareTheEngines) {
  constexpr int kGroups = 4;
  const Ranks options = ranks();
  // Each group has a membership of its own, and an engine reports a break to only one of them.
  if (options.transports == std::vector<std::string>{"sim"}) GTEST_SKIP() << "sim breaks";
  const LoopbackCards cards(options.transports);
  MemoryStore stores[kGroups];
  std::vector<std::shared_ptr<Engine>> engines;
  for (int rank = 0; rank < options.size; ++rank) {
    EngineOptions made{.env = envOf(options), .logName = "rank " + std::to_string(rank)};
    made.arenaBytes = size_t(1) << 30;
    made.jobKey = Bytes(32, std::byte{7});
    auto engine = Engine::create(std::move(made));
    ASSERT_TRUE(engine.ok()) << engine.error().message;
    engines.push_back(std::move(*engine));
  }
  std::vector<std::shared_ptr<Peer>> peers[kGroups];  // as rank 0 sees them
  std::vector<std::thread> threads;
  for (int g = 0; g < kGroups; ++g) {
    for (int rank = 0; rank < options.size; ++rank) {
      threads.emplace_back([&, g, rank] {
        auto group = Group::create(engines[size_t(rank)], stores[g],
                                   {.name = "test",
                                    .rank = rank,
                                    .size = options.size,
                                    .env = {.eagerBytes = options.eagerBytes},
                                    .mailboxBytes = kMailboxBytes},
                                   soon());
        ASSERT_TRUE(group.ok()) << group.error().message;
        for (int r = 1; rank == 0 && r < options.size; ++r)
          peers[g].push_back((*group)->window().peer(r));
        auto data = inputOf(rank, 1000);
        expectOk(broadcast(**group, bytesOf(data), DType::kFloat32, 0, soon()));
        EXPECT_EQ(data, inputOf(0, 1000));
        (*group)->leave(soon());
      });
    }
  }
  for (auto& thread : threads) thread.join();
  for (int g = 1; g < kGroups; ++g) EXPECT_EQ(peers[g], peers[0]);
}

INSTANTIATE_TEST_SUITE_P(
    Wires, CollectivesTest,
    testing::Combine(testing::Values(Wire{"inproc", {"inproc"}}, Wire{"shm", {"shm"}},
                                     Wire{"shm_without_cma", {"shm"}, false}, Wire{"tcp", {"tcp"}},
                                     Wire{"sim", {"sim"}}, Wire{"fabric", {"fabric"}}),
                     testing::Values(1, 2, 3, 5)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" +
             std::to_string(std::get<1>(info.param));
    });

}  // namespace
}  // namespace mooncake::test
