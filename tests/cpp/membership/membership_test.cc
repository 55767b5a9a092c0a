// Real engines in processes of their own, which are killed, stopped, or told to leave.
#include "membership/membership.h"

#include <array>
#include <atomic>
#include <csignal>
#include <gtest/gtest.h>
#include <memory>

#include "child_process.h"
#include "engine_side.h"

namespace mooncake::testing {
namespace {

enum class Order : uint8_t { kConnect = 1, kTell, kLeave, kJoin };

const JobIdentity kJob{.job = "the job", .mode = "continue"};

// The state that a rank reports to the test.
struct State {
  uint64_t epoch = 0;
  std::vector<int> active;
  std::vector<int> ofListener;  // ranks of the last view that the listener got
  uint32_t told = 0;            // views that the listener got
  ErrorCode standing = ErrorCode::kOk;
  ErrorCode over = ErrorCode::kOk;  // the error that the listener got
  std::string why;
  std::vector<Accusation> accusations;
  bool fenced = false;
  bool allKnow = false;
  uint64_t signs = 0;       // signs of life of all peers together
  bool watchesAll = false;  // each active peer has shown one, so its exit is seen as such
};

void putRanks(ByteWriter& out, const JobRanks& ranks) { ranks.write(out); }
std::vector<int> getRanks(ByteReader& in) {
  std::vector<int> ranks;
  JobRanks::read(in).forEach([&](int rank) { ranks.push_back(rank); });
  return ranks;
}

struct Recorder final : Membership::Listener {
  void onView(const View& view) override {
    std::lock_guard lock(mutex);
    for (int rank = 0; membership && rank < membership->size(); ++rank) {
      const auto peer = membership->peer(rank);
      if (!view.active.contains(rank) && peer) fenced = fenced && isFenced(*peer);
    }
    last = view;
    ++told;
  }
  void onOver(const Error& why) override {
    std::lock_guard lock(mutex);
    over = why.code;
    allKnow = membership->isOver();
  }
  // Over a socket, a request to a fenced peer ends at once.
  bool isFenced(Peer& peer) {
    if (!peer.channel->peerArena().empty()) return true;
    const Status got = peer.channel->get({{0, 1, 1}, 0, target, &completion});
    return got.code() == ErrorCode::kAborted || got.code() == ErrorCode::kPeerLost;
  }

  Membership* membership = nullptr;  // membership of these views; null: fences are not checked
  std::array<std::byte, 1> target;
  Doorbell bell;
  Completion completion{&bell};
  bool fenced = true;  // every rank that was out was fenced at each view
  std::mutex mutex;
  View last;
  uint32_t told = 0;
  ErrorCode over = ErrorCode::kOk;
  bool allKnow = false;  // membership was over already when the listener heard of it
};

TEST(MembershipChild, DISABLED_Rank) {
  if (!ChildProcess::isChild()) GTEST_SKIP() << "runs in children of other tests";
  auto env = EngineEnv::read();
  ASSERT_TRUE(env.ok());
  if (!env->hostIp) env->hostIp = "127.0.0.1";
  const auto failureTimeout = env->failureTimeout;
  EngineOptions options{.env = *env, .logName = "rank ?", .arenaBytes = size_t(1) << 30};
  options.jobKey = Bytes(32, std::byte{7});
  auto engine = Engine::create(std::move(options));
  ASSERT_TRUE(engine.ok()) << engine.error().message;
  sendMessage(ChildProcess::kToParent, (*engine)->endpoint());

  Recorder recorder;
  std::shared_ptr<Membership> membership;
  for (;;) {
    const Bytes message = receiveMessage(ChildProcess::kFromParent);
    if (message.empty()) break;
    ByteReader in(message);
    ByteWriter out;
    switch (static_cast<Order>(in.get<uint8_t>())) {
      case Order::kConnect: {
        const int rank = in.get<uint16_t>();
        const bool admits = in.get<bool>();
        std::vector<Bytes> endpoints(in.get<uint16_t>());
        for (Bytes& endpoint : endpoints) {
          const auto bytes = in.getBytes(4096);
          endpoint.assign(bytes.begin(), bytes.end());
        }
        auto peers = (*engine)->connect(endpoints, Deadline::after(kPatience));
        ASSERT_TRUE(peers.ok()) << peers.error().message;
        auto started =
            Membership::start(*engine, {.rank = rank,
                                        .peers = *peers,
                                        .failureTimeout = failureTimeout,
                                        .identity = admits ? std::optional(kJob) : std::nullopt});
        ASSERT_TRUE(started.ok()) << started.error().message;
        membership = *started;
        recorder.membership = membership.get();
        membership->subscribe(&recorder);
        // A peer that has shown no sign of life yet may still be connecting to others. It is not
        // watched.
        for (const auto& peer : *peers) {
          if (!peer) continue;
          ASSERT_TRUE(eventually([&] { return Liveness::signOf(*peer->channel) != 0; }));
        }
        break;
      }
      case Order::kTell: {
        const View view = membership->view();
        const Status standing = membership->standing();
        out.put(view.epoch);
        putRanks(out, view.active);
        {
          std::lock_guard lock(recorder.mutex);
          putRanks(out, recorder.last.active);
          out.put(recorder.told);
          out.put(static_cast<uint32_t>(recorder.over));
          out.put(recorder.fenced).put(recorder.allKnow);
        }
        uint64_t signs = 0;
        bool watchesAll = true;
        for (int rank = 0; rank < membership->size(); ++rank) {
          const auto peer = membership->peer(rank);
          if (!peer) continue;
          const uint64_t sign = Liveness::signOf(*peer->channel);
          signs += sign;
          watchesAll = watchesAll && (sign != 0 || !view.active.contains(rank));
        }
        out.put(signs).put(watchesAll);
        out.put(static_cast<uint32_t>(standing.code()));
        out.putString(standing.ok() ? "" : standing.error().message);
        const auto accusations = membership->accusations();
        out.put(static_cast<uint32_t>(accusations.size()));
        for (const auto& [accused, cause, by] : accusations) {
          out.put(static_cast<uint16_t>(accused)).put(static_cast<uint8_t>(cause));
          out.put(static_cast<uint16_t>(by));
        }
        break;
      }
      case Order::kLeave:
        (*engine)->leave();
        break;
      case Order::kJoin: {
        JoinOptions asked{.identity = kJob, .failureTimeout = failureTimeout};
        asked.rank = in.get<uint16_t>();
        asked.size = in.get<uint16_t>();
        const auto bytes = in.getBytes(4096);
        asked.members.emplace_back(bytes.begin(), bytes.end());
        auto joined = Membership::join(*engine, asked, Deadline::after(kPatience));
        ASSERT_TRUE(joined.ok()) << joined.error().message;
        membership = *joined;
        recorder.membership = membership.get();
        membership->subscribe(&recorder);
        break;
      }
    }
    sendMessage(ChildProcess::kToParent, out.put(uint8_t(0)).take());
  }
  if (membership) membership->unsubscribe(&recorder);
}

class Job {
 public:
  // `admits`: killed ranks may be replaced.
  Job(int ranks, const std::string& transports, int failureTimeoutMs, bool admits = false)
      : env_{{"MOONCAKE_TRANSPORTS", transports},
             {"MOONCAKE_LOG_LEVEL", "error"},
             {"MOONCAKE_FAILURE_TIMEOUT_MS", std::to_string(failureTimeoutMs)}} {
    for (int rank = 0; rank < ranks; ++rank)
      children_.push_back(std::make_unique<ChildProcess>("MembershipChild.DISABLED_Rank", env_));
    for (auto& child : children_) endpoints_.push_back(child->receive());
    const std::vector<Bytes>& endpoints = endpoints_;
    for (int rank = 0; rank < ranks; ++rank) {
      ByteWriter order;
      order.put(static_cast<uint8_t>(Order::kConnect)).put(static_cast<uint16_t>(rank));
      order.put(admits);
      order.put(static_cast<uint16_t>(ranks));
      for (const Bytes& endpoint : endpoints) order.putBytes(endpoint);
      child(rank).send(order.take());
    }
    for (auto& child : children_) EXPECT_FALSE(child->receive().empty());
  }
  ~Job() {
    for (auto& child : children_) {
      if (child->pid() > 0) ::kill(child->pid(), SIGCONT);
    }
  }

  void signal(int rank, int number) { ::kill(child(rank).pid(), number); }
  // Returns when the process has stopped.
  void stop(int rank) {
    signal(rank, SIGSTOP);
    int status = 0;
    EXPECT_EQ(::waitpid(child(rank).pid(), &status, WUNTRACED), child(rank).pid());
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  void kill(int rank) { child(rank).kill(); }
  // A new process asks to be this rank. It asks the rank `asked`.
  void beginJoin(int rank, int asked) {
    children_[size_t(rank)] = std::make_unique<ChildProcess>("MembershipChild.DISABLED_Rank", env_);
    endpoints_[size_t(rank)] = child(rank).receive();
    ByteWriter order;
    order.put(static_cast<uint8_t>(Order::kJoin)).put(static_cast<uint16_t>(rank));
    order.put(static_cast<uint16_t>(children_.size()));
    child(rank).send(order.putBytes(endpoints_[size_t(asked)]).take());
  }
  void endJoin(int rank) { EXPECT_FALSE(child(rank).receive().empty()); }
  void leave(int rank) { (void)ask(rank, Order::kLeave); }
  State tell(int rank) {
    const Bytes message = ask(rank, Order::kTell);
    ByteReader in(message);
    State state;
    state.epoch = in.get<uint64_t>();
    state.active = getRanks(in);
    state.ofListener = getRanks(in);
    state.told = in.get<uint32_t>();
    state.over = static_cast<ErrorCode>(in.get<uint32_t>());
    state.fenced = in.get<bool>();
    state.allKnow = in.get<bool>();
    state.signs = in.get<uint64_t>();
    state.watchesAll = in.get<bool>();
    state.standing = static_cast<ErrorCode>(in.get<uint32_t>());
    state.why = in.getString(4096);
    for (auto left = in.get<uint32_t>(); left > 0 && !in.failed(); --left) {
      Accusation one;
      one.rank = in.get<uint16_t>();
      one.cause = static_cast<Cause>(in.get<uint8_t>());
      one.by = in.get<uint16_t>();
      state.accusations.push_back(one);
    }
    in.get<uint8_t>();
    EXPECT_TRUE(in.finish("state").ok());
    return state;
  }

  // Waits until all survivors have this view. Checks that exactly these ranks are accused, and the
  // causes.
  void expectView(const std::vector<int>& survivors, uint64_t epoch,
                  const std::map<int, Cause>& accused) {
    for (const int rank : survivors) {
      State state;
      ASSERT_TRUE(eventually([&] {
        state = tell(rank);
        return state.epoch == epoch && state.active == survivors &&
               (epoch == 1 || state.ofListener == survivors);
      })) << "rank "
          << rank << " is in epoch " << state.epoch << " with " << state.active.size();
      EXPECT_EQ(state.standing, ErrorCode::kOk) << state.why;
      EXPECT_LE(state.told, epoch - 1);
      EXPECT_TRUE(state.fenced);
      std::map<int, Cause> causes;
      for (const auto& [who, cause, by] : state.accusations) causes[who] = cause;
      EXPECT_EQ(causes, accused) << "as rank " << rank << " sees it";
    }
  }

 private:
  ChildProcess& child(int rank) { return *children_[size_t(rank)]; }
  Bytes ask(int rank, Order order) {
    child(rank).send(ByteWriter().put(static_cast<uint8_t>(order)).take());
    return child(rank).receive();
  }

  std::map<std::string, std::string> env_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
  std::vector<Bytes> endpoints_;
};

constexpr int kLong = 60000, kShort = 200;  // failure timeouts, ms

TEST(MembershipTest, SurvivorsOfAKillGoOnInOneView) {
  Job job(3, "shm", kLong);
  job.kill(1);
  job.expectView({0, 2}, 2, {{1, Cause::kExited}});
}

TEST(MembershipTest, TwoAreKilledAtOnce) {
  Job job(4, "shm", kLong);
  job.signal(0, SIGKILL);
  job.signal(2, SIGKILL);
  job.expectView({1, 3}, 3, {{0, Cause::kExited}, {2, Cause::kExited}});
}

TEST(MembershipTest, OneAfterTheOtherUntilOneIsLeft) {
  Job job(4, "shm", kLong);
  job.kill(3);
  job.expectView({0, 1, 2}, 2, {{3, Cause::kExited}});
  job.kill(0);
  job.expectView({1, 2}, 3, {{0, Cause::kExited}, {3, Cause::kExited}});
  job.kill(2);
  job.expectView({1}, 4, {{0, Cause::kExited}, {2, Cause::kExited}, {3, Cause::kExited}});
}

// The last rank alive has seen all exits and read all crash reports, so it needs no quorum.
TEST(MembershipTest, TheHighestOfManyGoesOnAlone) {
  Job job(4, "shm", kLong);
  for (const int rank : {0, 1, 2}) job.signal(rank, SIGKILL);
  job.expectView({3}, 4, {{0, Cause::kExited}, {1, Cause::kExited}, {2, Cause::kExited}});
}

// The last word of rank 1 was read: it has helped no rank to go on without rank 0. So it does not
// count any more, and rank 0 is the lower half of the rest.
TEST(MembershipTest, WhoseLastWordWasReadIsNotCounted) {
  Job job(4, "shm", 500);
  job.kill(3);
  job.expectView({0, 1, 2}, 2, {{3, Cause::kExited}});
  job.stop(2);
  job.signal(1, SIGKILL);
  job.expectView({0}, 4, {{1, Cause::kExited}, {2, Cause::kSilent}, {3, Cause::kExited}});
}

TEST(MembershipTest, AGoodbyeAccusesNobody) {
  Job job(3, "shm", kLong);
  job.leave(2);
  job.expectView({0, 1}, 2, {});
  job.leave(0);
  job.expectView({1}, 3, {});
}

void expectEvicted(Job& job, int rank) {
  State state;
  ASSERT_TRUE(eventually([&] {
    state = job.tell(rank);
    return state.over != ErrorCode::kOk;
  }));
  EXPECT_EQ(state.over, ErrorCode::kEvicted);
  EXPECT_EQ(state.standing, ErrorCode::kEvicted);
  EXPECT_TRUE(state.allKnow);
  for (const char* part : {"invalid state", "rank is not active", "epoch 2", "silent"})
    EXPECT_NE(state.why.find(part), std::string::npos) << state.why;
}

class MembershipWires : public ::testing::TestWithParam<const char*> {};

TEST_P(MembershipWires, AStoppedRankIsSilentAndLearnsThatItIsOut) {
  Job job(3, GetParam(), kShort);
  job.stop(1);
  job.expectView({0, 2}, 2, {{1, Cause::kSilent}});
  job.signal(1, SIGCONT);
  expectEvicted(job, 1);
  job.expectView({0, 2}, 2, {{1, Cause::kSilent}});
}

// Lets a state last for this time. Only the clock can tell that it has lasted.
void hold(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// Time in which the detectors themselves did not run does not count.
TEST_P(MembershipWires, AllStoppedTogetherAccuseNobody) {
  Job job(3, GetParam(), kShort);
  for (int i = 0; i < 2; ++i) {
    for (const int rank : {0, 1, 2}) job.stop(rank);
    hold(4 * kShort);
    for (const int rank : {2, 0, 1}) job.signal(rank, SIGCONT);
    hold(2 * kShort);  // long enough to accuse a rank
  }
  job.expectView({0, 1, 2}, 1, {});
}

// The pauses are far shorter than the failure timeout.
TEST_P(MembershipWires, WhoIsHeardAgainInTimeCostsNothing) {
  Job job(2, GetParam(), 2000);
  for (int i = 0; i < 5; ++i) {
    job.stop(1);
    hold(300);
    const uint64_t before = job.tell(0).signs;
    job.signal(1, SIGCONT);
    ASSERT_TRUE(eventually([&] { return job.tell(0).signs > before; })) << "it is heard again";
  }
  job.expectView({0, 1}, 1, {});
}

TEST_P(MembershipWires, OfTwoTheLowerGoesOn) {
  Job job(2, GetParam(), kShort);
  job.stop(1);
  job.expectView({0}, 2, {{1, Cause::kSilent}});
  job.signal(1, SIGCONT);
  expectEvicted(job, 1);
}

TEST_P(MembershipWires, OfTwoTheHigherIsInTheMinority) {
  Job job(2, GetParam(), kShort);
  job.stop(0);
  State state;
  ASSERT_TRUE(eventually([&] {
    state = job.tell(1);
    return state.over != ErrorCode::kOk;
  }));
  EXPECT_EQ(state.over, ErrorCode::kMinority);
  EXPECT_EQ(state.standing, ErrorCode::kMinority) << state.why;
  EXPECT_EQ(state.epoch, 1u) << "no view is committed there";
  EXPECT_NE(state.why.find("rank 0 (silent)"), std::string::npos) << state.why;
  job.signal(0, SIGCONT);
  job.expectView({0}, 2, {});  // rank 1 has said goodbye
}

TEST_P(MembershipWires, AKilledRankIsReplacedAndThenItsReplacement) {
  Job job(4, GetParam(), kLong, true);
  const bool isCertain = std::string(GetParam()) == "shm";
  const Cause how = isCertain ? Cause::kExited : Cause::kRefused;
  job.kill(2);
  job.expectView({0, 1, 3}, 2, {{2, how}});
  job.beginJoin(2, 1);
  job.endJoin(2);
  job.expectView({0, 1, 2, 3}, 3, {});
  for (const int rank : {0, 1, 3})
    EXPECT_TRUE(eventually([&] { return job.tell(rank).watchesAll; }));
  job.kill(2);
  job.expectView({0, 1, 3}, 4, {{2, how}});
  job.beginJoin(2, 0);
  job.endJoin(2);
  job.expectView({0, 1, 2, 3}, 5, {});
  job.kill(0);
  job.expectView({1, 2, 3}, 6, {{0, how}});
  job.beginJoin(0, 2);
  job.endJoin(0);
  job.expectView({0, 1, 2, 3}, 7, {});
}

// Wherever on its way it is.
TEST_P(MembershipWires, AKilledNewcomerCostsNothing) {
  Job job(3, GetParam(), 2000, true);
  job.kill(1);
  for (int i = 0; i < 5; ++i) {
    job.beginJoin(1, i % 2 == 0 ? 0 : 2);
    hold(4 * i);
    job.kill(1);
  }
  job.beginJoin(1, 2);
  job.endJoin(1);
  for (const int rank : {0, 1, 2}) {
    EXPECT_TRUE(eventually([&] { return job.tell(rank).active == std::vector({0, 1, 2}); }));
    EXPECT_EQ(job.tell(rank).standing, ErrorCode::kOk);
  }
}

// The newcomer waits until the job has agreed that the stopped rank is out.
TEST_P(MembershipWires, AMemberThatStopsMeanwhileIsAnOrdinaryLoss) {
  Job job(4, GetParam(), 500, true);
  job.kill(3);
  job.beginJoin(3, 0);
  job.stop(1);
  job.endJoin(3);
  for (const int rank : {0, 2, 3}) {
    EXPECT_TRUE(eventually([&] { return job.tell(rank).active == std::vector({0, 2, 3}); }));
    EXPECT_EQ(job.tell(rank).standing, ErrorCode::kOk);
  }
  job.signal(1, SIGCONT);
  EXPECT_TRUE(eventually([&] { return job.tell(1).standing == ErrorCode::kEvicted; }));
  job.kill(1);
  job.beginJoin(1, 3);
  job.endJoin(1);
  for (const int rank : {0, 1, 2, 3})
    EXPECT_TRUE(eventually([&] { return job.tell(rank).active == std::vector({0, 1, 2, 3}); }));
}

INSTANTIATE_TEST_SUITE_P(Wires, MembershipWires, ::testing::Values("shm", "tcp"),
                         [](const auto& wire) { return std::string(wire.param); });

// Between hosts no rank can testify, so the death is a suspicion. It is known without a wait.
TEST(MembershipTest, OverTcpAKilledRankRefuses) {
  Job job(3, "tcp", kLong);
  job.kill(1);
  job.expectView({0, 2}, 2, {{1, Cause::kRefused}});
}

TEST(MembershipTest, OverTcpTheHigherOfTwoMayNotGoOnAlone) {
  Job job(2, "tcp", kLong);
  job.kill(0);
  State state;
  ASSERT_TRUE(eventually([&] {
    state = job.tell(1);
    return state.standing != ErrorCode::kOk;
  }));
  EXPECT_EQ(state.standing, ErrorCode::kMinority) << state.why;
}

TEST(MembershipTest, AGoodbyeOverTcpAccusesNobody) {
  Job job(3, "tcp", kLong);
  job.leave(0);
  job.expectView({1, 2}, 2, {});
}

// One process, so that sanitizers see both sides.
class MembershipInOneProcess : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::vector<Bytes> endpoints;
    for (int rank = 0; rank < 3; ++rank) {
      EngineOptions options{.logName = "rank " + std::to_string(rank),
                            .arenaBytes = size_t(1) << 30};
      options.env.transports = {GetParam()};
      options.env.hostIp = "127.0.0.1";
      options.jobKey = Bytes(32, std::byte{7});
      auto made = Engine::create(std::move(options));
      ASSERT_TRUE(made.ok()) << made.error().message;
      engines.push_back(*made);
      endpoints.push_back((*made)->endpoint());
    }
    members.resize(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        auto peers = engines[rank]->connect(endpoints, Deadline::after(kPatience));
        ASSERT_TRUE(peers.ok()) << peers.error().message;
        auto member = Membership::start(engines[rank], {.rank = rank, .peers = *peers});
        ASSERT_TRUE(member.ok());
        members[rank] = *member;
      });
    }
    for (auto& thread : threads) thread.join();
  }

  std::vector<std::shared_ptr<Engine>> engines;
  std::vector<std::shared_ptr<Membership>> members;
};

TEST_P(MembershipInOneProcess, GoesWhileItIsTold) {
  std::vector<Recorder> recorders(3);
  for (int rank = 0; rank < 3; ++rank) members[rank]->subscribe(&recorders[rank]);
  engines[2]->leave();
  members[1]->unsubscribe(&recorders[1]);
  members[1].reset();
  EXPECT_TRUE(eventually([&] {
    std::lock_guard lock(recorders[0].mutex);
    return recorders[0].told == 0 || recorders[0].last.epoch == 2;
  }));
  members[0].reset();
  members[2].reset();
}

TEST_P(MembershipInOneProcess, WhoSubscribesLateIsToldWhatHappened) {
  engines[0]->leave();
  for (const int rank : {1, 2})
    ASSERT_TRUE(eventually([&] { return members[rank]->view().epoch == 2; }));
  Recorder recorder;
  members[1]->subscribe(&recorder);
  EXPECT_TRUE(eventually([&] {
    std::lock_guard lock(recorder.mutex);
    return recorder.told == 1 && recorder.last == members[2]->view();
  }));
  members[1]->unsubscribe(&recorder);
  EXPECT_TRUE(members[1]->accusations().empty());
  ASSERT_EQ(members[1]->seen().size(), 1u);
  EXPECT_EQ(members[1]->seen()[0].accusation.cause, Cause::kLeft);
}

TEST_P(MembershipInOneProcess, RanksThatLeaveReportNoGoodbye) {
  std::vector<Recorder> recorders(2);
  const auto awaitLoop = [&](int rank) {
    members[rank]->subscribe(&recorders[rank]);
    members[rank]->unsubscribe(&recorders[rank]);
  };
  for (const int rank : {0, 1}) {
    members[rank]->holdGoodbyes(Clock::now() + std::chrono::hours(1));
    awaitLoop(rank);
  }
  engines[2]->leave();
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(eventually([&] { return members[rank]->peer(2)->disconnected.load(); }));
    awaitLoop(rank);
    EXPECT_EQ(members[rank]->view().epoch, 1u);
  }
  for (const int rank : {0, 1}) {
    members[rank]->leave();
    engines[rank]->leave();
    EXPECT_EQ(engines[rank]->counters().messages, 0u);
    EXPECT_TRUE(members[rank]->standing().ok());
  }
}

TEST_P(MembershipInOneProcess, ReportsThatSpeakForOthersAreDropped) {
  ViewReport report{
      .from = 1, .gone = {2}, .settled = {2}, .accusations = {{2, Cause::kExited, 1}}};
  const Bytes forged = encodeViewReport(report);
  ASSERT_TRUE(engines[0]->send(*members[0]->peer(2), kMembershipTopic, forged).ok());
  ASSERT_TRUE(engines[0]->send(*members[0]->peer(1), kMembershipTopic, forged).ok());
  ASSERT_TRUE(engines[0]->send(*members[0]->peer(1), kMembershipTopic, Bytes(100)).ok());
  // Messages of one sender are handled in order: when the view has come, these have been handled.
  engines[0]->leave();
  for (const int rank : {1, 2})
    ASSERT_TRUE(eventually([&] { return members[rank]->view().epoch == 2; }));
  for (const int rank : {1, 2}) {
    EXPECT_EQ(members[rank]->view().active, (JobRanks{1, 2}));
    EXPECT_TRUE(members[rank]->standing().ok());
  }
}

// Ranks that leave together hear that the others go on without them. That is no eviction.
TEST_P(MembershipInOneProcess, WhoLeavesIsNotToldOff) {
  for (const int rank : {1, 2}) {
    const JobRanks out{rank};
    const Bytes report = encodeViewReport(
        {.from = 0, .committed = out, .gone = out, .accusations = {{rank, Cause::kLeft, 0}}});
    if (rank == 2) members[2]->leave();
    ASSERT_TRUE(engines[0]->send(*members[0]->peer(rank), kMembershipTopic, report).ok());
  }
  ASSERT_TRUE(eventually([&] { return members[1]->standing().code() == ErrorCode::kEvicted; }));
  constexpr uint64_t kBehindIt = 7;
  std::atomic<bool> hasCome{false};
  engines[2]->openTopic(kBehindIt, [&](const EngineId&, ByteView) { hasCome.store(true); });
  ASSERT_TRUE(engines[0]->send(*members[0]->peer(2), kBehindIt, Bytes(1)).ok());
  ASSERT_TRUE(eventually([&] { return hasCome.load(); }));
  engines[2]->closeTopic(kBehindIt);
  EXPECT_TRUE(members[2]->standing().ok());
  EXPECT_FALSE(members[2]->isOver());
}

INSTANTIATE_TEST_SUITE_P(Wires, MembershipInOneProcess, ::testing::Values("inproc", "shm", "tcp"),
                         [](const auto& wire) { return std::string(wire.param); });

}  // namespace
}  // namespace mooncake::testing
