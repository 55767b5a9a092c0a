// A job begins on all of its ranks, or on none.
#include <algorithm>
#include <atomic>
#include <functional>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

#include "engine/rendezvous/address_book.h"
#include "engine/route.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

// Returns the published data of a rank, with a window address that does not decode.
Bytes withoutWindow(const Bytes& published) {
  ByteReader in(published);
  const auto version = in.get<uint32_t>();
  const auto endpoint = in.getBytes(64 << 10);
  const auto topic = in.get<uint64_t>();
  (void)in.getBytes(1 << 10);
  const auto mailboxes = in.getBytes(1 << 10);
  const bool raises = in.get<bool>();
  return ByteWriter()
      .put(version)
      .putBytes(endpoint)
      .put(topic)
      .putBytes(ByteWriter().put(uint8_t(1)).bytes())
      .putBytes(mailboxes)
      .put(raises)
      .take();
}

// Returns the endpoint in the published data of a rank.
Bytes endpointIn(const Bytes& published) {
  ByteReader in(published);
  (void)in.get<uint32_t>();
  const auto endpoint = in.getBytes(64 << 10);
  return {endpoint.begin(), endpoint.end()};
}

// Returns the rank that calls all others. In each pair the engine with the smaller id calls.
int rankThatCallsAll(const std::vector<Bytes>& published) {
  std::vector<EngineId> ids;
  for (const Bytes& one : published) ids.push_back(*endpointOwner(endpointIn(one)));
  return static_cast<int>(std::ranges::min_element(ids) - ids.begin());
}

class JobBegin : public testing::TestWithParam<const char*> {
 protected:
  // Changes the data that all ranks have published, as one rank sees it, before this rank connects.
  // Returns false if the rank ends here, and its engine with it.
  using Heard = std::function<bool(int rank, std::vector<Bytes>& published)>;

  // Makes a group of `size` ranks, and returns the status of each rank.
  static std::vector<Status> begin(int size, bool raises, const Heard& heard) {
    MemoryStore store;
    const Ranks ranks{
        .size = size, .transports = {GetParam()}, .failureTimeout = std::chrono::seconds(1)};
    std::vector<Status> ends(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const Deadline deadline = Deadline::after(std::chrono::minutes(10));
        EngineOptions options{.env = envOf(ranks),
                              .logName = "rank " + std::to_string(rank),
                              .arenaBytes = size_t(1) << 30};
        options.jobKey = Bytes(32, std::byte{7});
        auto engine = Engine::create(std::move(options));
        ASSERT_TRUE(engine.ok()) << engine.error().message;
        const auto meet = [&](const Result<Bytes>& mine) -> Result<std::vector<Bytes>> {
          if (!mine.ok()) return mine.error();
          auto all = exchange(store, "members", rank, size, *mine, deadline);
          if (all.ok() && !heard(rank, *all)) return Error{ErrorCode::kAborted, "ended"};
          return all;
        };
        auto group =
            Group::create(*engine, meet,
                          {.name = "test", .rank = rank, .size = size, .raises = raises}, deadline);
        ends[size_t(rank)] = group.status();
        if (group.ok()) (*group)->leave(Deadline::after(std::chrono::seconds(5)));
      });
    }
    for (auto& thread : threads) thread.join();
    return ends;
  }

  static void expectThatAllName(int victim, const std::vector<Status>& ends) {
    for (int rank = 0; rank < static_cast<int>(ends.size()); ++rank) {
      const Status& end = ends[size_t(rank)];
      ASSERT_FALSE(end.ok()) << "rank " << rank << " began without rank " << victim;
      if (rank == victim) continue;
      EXPECT_EQ(end.code(), ErrorCode::kPeerLost) << end.error().message;
      EXPECT_NE(end.error().message.find("rank " + std::to_string(victim)), std::string::npos)
          << end.error().message;
    }
  }
};

TEST(JobBeginWithoutMemory, SaysHowManyGroupsFitAndWhatToDo) {
  EngineOptions made{.env = envOf({.size = 1, .transports = {"shm"}}), .arenaBytes = 4 << 20};
  made.jobKey = Bytes(32, std::byte{7});
  auto engine = Engine::create(std::move(made));
  ASSERT_TRUE(engine.ok()) << engine.error().message;
  std::vector<std::unique_ptr<Group>> groups;
  for (;;) {
    MemoryStore store;
    const Deadline deadline = Deadline::after(std::chrono::minutes(1));
    auto group = Group::create(*engine, store, {.name = "test", .size = 1}, deadline);
    if (group.ok()) {
      groups.push_back(std::move(*group));
      continue;
    }
    EXPECT_EQ(group.error().code, ErrorCode::kExhausted);
    const std::string& text = group.error().message;
    for (const std::string part :
         {std::string("group 'test' cannot be made on rank 0: no room for"),
          std::string("an arena of 4194304 bytes"), std::string("Destroy groups"),
          std::string("MOONCAKE_EAGER_BYTES")})
      EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
    // Of an empty arena, as the text says: the engine's own memory may take the place of one.
    const auto saysThatFit = [&](size_t count) {
      return text.find("so " + std::to_string(count) + " fit if nothing else") != text.npos;
    };
    EXPECT_TRUE(saysThatFit(groups.size()) || saysThatFit(groups.size() + 1)) << text;
    break;
  }
  EXPECT_FALSE(groups.empty());
}

TEST_P(JobBegin, ARankThatFailsOnceItIsConnectedFailsAllAndIsNamed) {
  for (const bool raises : {false, true}) {
    for (const int size : {2, 4}) {
      for (const int victim : {0, 1}) {
        expectThatAllName(victim, begin(size, raises, [&](int rank, std::vector<Bytes>& all) {
                            Bytes& other = all[size_t((victim + 1) % size)];
                            if (rank == victim) other = withoutWindow(other);
                            return true;
                          }));
      }
    }
  }
}

// A store may answer one rank late. The failure timeout does not bound this, only a rank's silence.
TEST_P(JobBegin, ARankThatLearnsTheAddressesLateIsWaitedFor) {
  const auto ends = begin(4, false, [](int rank, const std::vector<Bytes>& all) {
    if (rank == rankThatCallsAll(all)) std::this_thread::sleep_for(std::chrono::milliseconds(1700));
    return true;
  });
  for (const Status& end : ends) EXPECT_TRUE(end.ok()) << end.error().message;
}

// The end comes before the deadline of ten minutes, or else the test's own deadline passes.
TEST_P(JobBegin, ARankThatDiesOnceItsAddressIsKnownIsNamedSoon) {
  std::atomic<int> victim{-1};
  const auto ends = begin(3, false, [&](int rank, const std::vector<Bytes>& all) {
    victim = rankThatCallsAll(all);
    return rank != victim;
  });
  // The others may also name each other, because the first one that gives up ends its engine.
  for (const Status& end : ends) EXPECT_FALSE(end.ok());
}

INSTANTIATE_TEST_SUITE_P(Wires, JobBegin, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace mooncake::test
