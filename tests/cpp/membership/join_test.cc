// Processes that become ranks of a running job, each with an engine of its own in this process.
#include <atomic>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "engine_side.h"
#include "job_side.h"
#include "membership/membership.h"

namespace mooncake::testing {
namespace {

constexpr std::chrono::milliseconds kLong(60'000);

struct Member {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Membership> membership;
};

struct Recorder final : Membership::Listener {
  void onView(const View& view) override {
    std::lock_guard lock(mutex);
    last = view;
  }
  void onRoster(const std::shared_ptr<const Roster>& now) override {
    std::lock_guard lock(mutex);
    roster = now;
  }
  void onOver(const Error&) override {}

  std::mutex mutex;
  View last;
  std::shared_ptr<const Roster> roster;
};

class Join : public ::testing::TestWithParam<const char*> {
 protected:
  std::shared_ptr<Engine> makeEngine(const std::string& name) {
    return makeJobEngine(GetParam(), name, failureTimeout);
  }

  void begin(int size) {
    std::vector<Bytes> endpoints;
    for (int rank = 0; rank < size; ++rank) {
      members.push_back({makeEngine("rank " + std::to_string(rank)), nullptr});
      endpoints.push_back(members.back().engine->endpoint());
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        Member& self = members[size_t(rank)];
        auto peers = self.engine->connect(endpoints, Deadline::after(kPatience));
        ASSERT_TRUE(peers.ok()) << peers.error().message;
        auto started = Membership::start(
            self.engine,
            {.rank = rank, .peers = *peers, .failureTimeout = failureTimeout, .identity = kJob});
        ASSERT_TRUE(started.ok()) << started.error().message;
        self.membership = *started;
      });
    }
    for (auto& thread : threads) thread.join();
  }

  // As its own process says so, this is as good as an exit.
  void kill(int rank) {
    Member& self = members[size_t(rank)];
    self.engine->leave({Farewell::How::kFailed, "killed by the test"});
    self = {};
  }
  JoinOptions optionsFor(int rank, int asked) {
    return {.identity = kJob,
            .members = {members[size_t(asked)].engine->endpoint()},
            .rank = rank,
            .size = static_cast<int>(members.size()),
            .failureTimeout = failureTimeout};
  }
  Result<std::shared_ptr<Membership>> ask(JoinOptions options,
                                          std::shared_ptr<Engine> engine = nullptr) {
    if (!engine) engine = makeEngine("newcomer");
    return Membership::join(std::move(engine), std::move(options), Deadline::after(kPatience));
  }
  // As a program does: begins again with a new engine where that may help.
  Result<Member> askAgain(const JoinOptions& options) {
    for (;;) {
      const auto engine = makeEngine("newcomer for rank " + std::to_string(options.rank));
      auto joined = ask(options, engine);
      if (joined.ok()) return Member{engine, *joined};
      if (joined.error().code != ErrorCode::kInterrupted) return joined.error();
    }
  }
  void join(int rank, int asked) {
    auto joined = askAgain(optionsFor(rank, asked));
    ASSERT_TRUE(joined.ok()) << joined.error().message;
    EXPECT_EQ(joined->membership->rank(), rank);
    members[size_t(rank)] = *joined;
  }
  // All members are in this view, with one roster, and have connections to each other.
  void expectView(const View& view) {
    for (const Member& member : members) {
      if (!member.membership) continue;
      ASSERT_TRUE(eventually([&] { return member.membership->view() == view; }))
          << member.engine->logName() << " is in epoch " << member.membership->view().epoch
          << " with " << member.membership->view().active.count() << " ranks";
      const auto roster = member.membership->roster();
      view.active.forEach([&](int rank) {
        ASSERT_TRUE(members[size_t(rank)].engine);
        EXPECT_EQ(roster->term.holders[size_t(rank)]->id, members[size_t(rank)].engine->id());
        if (rank == member.membership->rank()) {
          EXPECT_FALSE(roster->peer(rank));
        } else {
          ASSERT_TRUE(eventually([&] { return member.membership->peer(rank) != nullptr; }));
          const auto roster = member.membership->roster();
          EXPECT_FALSE(roster->peer(rank)->disconnected);
        }
      });
      EXPECT_TRUE(member.membership->standing().ok());
    }
  }
  void TearDown() override {
    for (Member& member : members) member.membership.reset();
  }

  std::chrono::milliseconds failureTimeout = kLong;
  std::vector<Member> members;
};

TEST_P(Join, AProcessTakesTheRankOfOneThatDiedAndThenAnotherOne) {
  begin(4);
  const auto first = members[0].membership->roster();
  Recorder recorder, ofFirst;
  members[0].membership->subscribe(&recorder);
  members[0].membership->subscribe(&ofFirst, first);
  kill(2);
  expectView({2, {0, 1, 3}});
  join(2, 0);
  expectView({3, {0, 1, 2, 3}});
  EXPECT_TRUE(eventually([&] {
    std::lock_guard lock(recorder.mutex);
    return recorder.roster && recorder.last == View{3, {0, 1, 2, 3}};
  }));
  {
    std::lock_guard lock(ofFirst.mutex);
    EXPECT_EQ(ofFirst.last.active, (JobRanks{0, 1, 3})) << "rank 2 of that roster is out for good";
  }
  EXPECT_EQ(members[0].membership->viewOf(*first).active, (JobRanks{0, 1, 3}));
  EXPECT_TRUE(members[0].membership->seen().empty()) << "rank 2 is there";
  ASSERT_EQ(members[0].membership->seen(*first).size(), 1u);
  EXPECT_EQ(members[0].membership->seen(*first)[0].accusation.rank, 2);

  kill(0);
  recorder.last = {};
  expectView({4, {1, 2, 3}});
  join(0, 2);  // a newcomer lets the next one in
  expectView({5, {0, 1, 2, 3}});
  kill(2);
  expectView({6, {0, 1, 3}});
  join(2, 0);
  expectView({7, {0, 1, 2, 3}});
}

TEST_P(Join, SeveralTakeRanksAtOnce) {
  begin(5);
  for (const int rank : {1, 3, 4}) kill(rank);
  expectView({4, {0, 2}});
  std::vector<std::thread> others;
  others.emplace_back([&] { join(3, 2); });
  others.emplace_back([&] { join(4, 0); });
  join(1, 0);
  for (auto& other : others) other.join();
  EXPECT_TRUE(
      eventually([&] { return members[0].membership->view().active == JobRanks::firstRanks(5); }));
  expectView(members[0].membership->view());
}

TEST_P(Join, OfTwoForOneRankOneIsLetIn) {
  failureTimeout = std::chrono::seconds(2);  // the other one asks for a few of them
  begin(3);
  kill(2);
  expectView({2, {0, 1}});
  std::atomic<int> in{0};
  std::vector<std::thread> threads;
  for (const int asked : {0, 1}) {
    threads.emplace_back([&, asked] {
      auto joined = askAgain(optionsFor(2, asked));
      if (!joined.ok()) {
        EXPECT_EQ(joined.error().code, ErrorCode::kRefused) << joined.error().message;
        return;
      }
      ++in;
      members[2] = *joined;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(in.load(), 1);
  for (const Member& member : members)
    EXPECT_TRUE(eventually([&] {
      return member.membership->view().active == JobRanks({0, 1, 2});
    }));
}

TEST_P(Join, IsRefusedByName) {
  begin(2);
  kill(1);
  expectView({2, {0}});
  const auto refused = [&](const std::string& why, auto change) {
    JoinOptions options = optionsFor(1, 0);
    change(options);
    const auto joined = ask(options);
    ASSERT_FALSE(joined.ok()) << why;
    EXPECT_EQ(joined.error().code, ErrorCode::kRefused) << joined.error().message;
    EXPECT_NE(joined.error().message.find(why), std::string::npos) << joined.error().message;
  };
  refused("another job", [](JoinOptions& o) { o.identity.job = "another"; });
  refused("mode 'continue'", [](JoinOptions& o) { o.identity.mode = "raise"; });
  refused("options differ", [](JoinOptions& o) { o.identity.options = 8; });
  refused("has 2 ranks, not 3", [](JoinOptions& o) { o.size = 3; });
  EXPECT_EQ(members[0].membership->view().epoch, 2u) << "none of them has cost the job anything";
  join(1, 0);
  failureTimeout = std::chrono::milliseconds(50);  // of the newcomer: it does not wait for long
  refused("held by a living process", [](JoinOptions&) {});
  expectView({3, {0, 1}});
}

TEST_P(Join, MessagesThatMakeNoSenseAdmitNobody) {
  begin(2);
  kill(1);
  expectView({2, {0}});
  const auto stranger = makeEngine("stranger");
  const auto peer =
      stranger->open(members[0].engine->endpoint(), "member", Deadline::after(kPatience));
  ASSERT_TRUE(peer.ok());
  JoinRequest connected{.identity = kJob,
                        .rank = 1,
                        .size = 2,
                        .process = 1,
                        .host = "x",
                        .endpoint = stranger->endpoint()};
  connected.connected = {TermId{5, 5}, 77};
  const Bytes old = encodeJoinMessage(connected);
  ViewReport report{.from = 1, .isCandidate = true};
  report.joins = {{.rank = 1, .id = stranger->id()}};
  // A report of a process that has not asked is dropped.
  ASSERT_TRUE(stranger->send(**peer, kMembershipTopic, encodeViewReport(report)).ok());
  for (const Bytes& bytes : {Bytes(1), Bytes(100), Bytes(old.begin(), old.end() - 1), old})
    ASSERT_TRUE(stranger->send(**peer, kJoinTopic, bytes).ok());
  // It is answered with the roster, as its view is not that of the member.
  std::atomic<bool> isAnswered{false};
  stranger->openTopic(kJoinTopic, [&](const EngineId&, ByteView message) {
    const auto answer = decodeJoinMessage(message);
    if (answer.ok() && std::holds_alternative<RosterPart>(*answer)) isAnswered = true;
  });
  EXPECT_TRUE(eventually([&] { return isAnswered.load(); }));
  stranger->closeTopic(kJoinTopic);
  EXPECT_EQ(members[0].membership->view(), (View{2, {0}}));
}

TEST_P(Join, ACandidateThatEndsIsForgotten) {
  begin(3);
  kill(1);
  expectView({2, {0, 2}});
  for (int i = 0; i < 3; ++i) {
    const auto engine = makeEngine("candidate");
    std::atomic<bool> isAsked{false};
    // It asks, and ends when it gets the roster.
    engine->openTopic(kJoinTopic, [&](const EngineId&, ByteView) { isAsked = true; });
    const auto peer =
        engine->open(members[0].engine->endpoint(), "member", Deadline::after(kPatience));
    ASSERT_TRUE(peer.ok());
    const JoinRequest request{.identity = kJob,
                              .rank = 1,
                              .size = 3,
                              .process = 1,
                              .host = "x",
                              .endpoint = engine->endpoint()};
    ASSERT_TRUE(engine->send(**peer, kJoinTopic, encodeJoinMessage(request)).ok());
    ASSERT_TRUE(eventually([&] { return isAsked.load(); }));
    engine->closeTopic(kJoinTopic);
    engine->leave({Farewell::How::kFailed, "killed by the test"});
  }
  EXPECT_EQ(members[0].membership->view().epoch, 2u);
  join(1, 2);
  expectView({3, {0, 1, 2}});
}

// Says that it is connected, and is not: it is added, and its end closes the term.
TEST_P(Join, ACandidateThatEndsWhileItIsLetInCostsNoOperation) {
  begin(3);
  kill(1);
  expectView({2, {0, 2}});
  const auto engine = makeEngine("candidate");
  std::vector<std::shared_ptr<Peer>> peers;
  for (const int rank : {0, 2}) {
    const auto peer = engine->open(members[size_t(rank)].engine->endpoint(), "member",
                                   Deadline::after(kPatience));
    ASSERT_TRUE(peer.ok());
    peers.push_back(*peer);
  }
  JoinRequest connected{.identity = kJob,
                        .rank = 1,
                        .size = 3,
                        .process = 1,
                        .host = "x",
                        .endpoint = engine->endpoint()};
  connected.connected = {members[0].membership->roster()->term.id(), 2};
  std::atomic<int> reports{0};
  engine->openTopic(kMembershipTopic, [&](const EngineId&, ByteView) { ++reports; });
  ASSERT_TRUE(engine->send(*peers[0], kJoinTopic, encodeJoinMessage(connected)).ok());
  ASSERT_TRUE(eventually([&] { return reports.load() >= 2; })) << "both have added it";
  engine->closeTopic(kMembershipTopic);
  engine->leave({Farewell::How::kFailed, "killed by the test"});
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(eventually([&] { return members[size_t(rank)].membership->view().epoch == 4u; }));
    EXPECT_EQ(members[size_t(rank)].membership->view().active, (JobRanks{0, 2}));
    EXPECT_EQ(members[size_t(rank)].membership->roster()->term.number, 1u);
  }
  join(1, 0);
  expectView({5, {0, 1, 2}});
}

TEST_P(Join, AMemberThatDiesMeanwhileIsAnOrdinaryLoss) {
  begin(4);
  kill(3);
  expectView({2, {0, 1, 2}});
  std::thread newcomer([&] { join(3, 0); });
  kill(1);
  newcomer.join();
  ASSERT_TRUE(members[3].membership);
  for (const int rank : {0, 2, 3})
    EXPECT_TRUE(eventually([&] {
      return members[size_t(rank)].membership->view() == (View{4, {0, 2, 3}});
    })) << rank;
  join(1, 3);
  expectView({5, {0, 1, 2, 3}});
}

// 30 replacements leave nothing behind that grows.
TEST_P(Join, ReplacementsLeaveNoPeersBehind) {
  begin(2);
  uint64_t epoch = 1;
  uint64_t after = 0;
  for (int i = 0; i < 12; ++i) {
    kill(1);
    expectView({++epoch, {0}});
    join(1, 0);
    expectView({++epoch, {0, 1}});
    if (i == 3) after = members[0].engine->peers();
  }
  EXPECT_TRUE(eventually([&] { return members[0].engine->peers() <= after; }))
      << members[0].engine->peers() << " peers, " << after << " before";
}

INSTANTIATE_TEST_SUITE_P(Wires, Join, ::testing::Values("inproc", "shm", "tcp"),
                         [](const auto& wire) { return std::string(wire.param); });

}  // namespace
}  // namespace mooncake::testing
