// Ranks that are taken out of their group by plan, and come back, over all wires and in both modes.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <mutex>
#include <numeric>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/failpoint.h"
#include "collectives/collectives.h"
#include "collectives/point_to_point.h"
#include "engine_side.h"
#include "group/group_line.h"
#include "ranks_in_threads.h"
#include "socket_breaker.h"

namespace mooncake::test {
namespace {

using mooncake::testing::eventually;

// A rank's line of all ranks of the job, and the thread that runs its calls.
class LineSide {
 public:
  LineSide(Group& job, bool raises) : job_(job), raises_(raises) {
    auto first = Group::createWithin(job.membership(), events_->with(groupOptions(), 1), soon());
    EXPECT_TRUE(first.ok()) << first.error().message;
    GroupOptions series = groupOptions();
    series.jobRanks = series.globalRanks;
    line_ = std::make_unique<GroupLine>(
        job.membership(), std::move(*first), events_,
        GroupLine::Options{
            .group = std::move(series),
            .identity = "line",
            .onDue =
                [this] {
                  std::lock_guard lock(operation_);
                  line_->moveOn();
                },
            .onMove =
                [this](Group& to, const std::vector<bool>& stays) {
                  if (onMove) onMove(to, stays);
                },
            .makeAlone = [this](GroupOptions options) -> Result<std::unique_ptr<Group>> {
              if (beforeAlone) beforeAlone();
              return makeAlone(std::move(options));
            }});
    EXPECT_TRUE(line_->start().ok());
  }
  ~LineSide() {
    EXPECT_TRUE(line_->settle(soon()));
    line_->stop();
    line_->current()->leave(soon());
  }

  Group& job() { return job_; }
  GroupLine& line() { return *line_; }
  int rank() const { return job_.rank(); }

  // The ranks that took part, a bit each.
  Result<int64_t> call() {
    std::lock_guard lock(operation_);
    for (;;) {
      const auto group = line_->current();
      int64_t ranks = int64_t(1) << rank();
      const Status status = allreduce(*group, std::as_writable_bytes(std::span(&ranks, 1)),
                                      {DType::kInt64, ReduceKind::kSum}, soon());
      if (status.ok()) return ranks;
      if (status.code() != ErrorCode::kMoved) return status.error();
      EXPECT_NE(line_->moveOn(), group);
    }
  }
  // Calls until these ranks take part. Before that, the ones of `before`.
  void callUntil(int64_t ranks, int64_t before) {
    for (;;) {
      const auto took = call();
      ASSERT_TRUE(took.ok()) << took.error().message;
      if (*took == ranks) return;
      ASSERT_EQ(*took, before);
    }
  }
  // Calls until this rank is out.
  void callUntilOut(int64_t before) {
    for (;;) {
      const auto took = call();
      if (!took.ok()) return expectRefused(took.status());
      ASSERT_EQ(*took, before);
    }
  }
  void takeOut(const std::vector<int>& ranks) {
    const Status removed = line_->remove(ranks, soon());
    EXPECT_TRUE(removed.ok()) << removed.error().message;
  }
  // Takes this rank out, after the calls before another change.
  void takeItselfOut() {
    for (;;) {
      const Status removed = line_->remove({rank()}, soon());
      if (removed.ok()) return;
      ASSERT_TRUE(isAnotherChange(removed)) << removed.error().message;
      const auto took = call();
      ASSERT_TRUE(took.ok()) << took.error().message;
    }
  }
  static bool isAnotherChange(const Status& status) {
    return status.code() == ErrorCode::kRefused &&
           status.error().message.find("another change of group 'line'") != std::string::npos;
  }
  void expectOut() {
    EXPECT_TRUE(line_->isRemoved());
    EXPECT_TRUE(line_->isNewcomer());
    expectRefused(call().status());
    expectRefused(line_->remove({(rank() + 1) % job_.size()}, soon()));
    expectRefused(line_->recover({(rank() + 1) % job_.size()}, soon(), soon()).status());
    EXPECT_TRUE(line_->remove({rank()}, soon()).ok());
  }
  void expectRefused(const Status& status) const {
    ASSERT_EQ(status.code(), ErrorCode::kRefused);
    const std::string& message = status.error().message;
    for (const std::string& part :
         {std::string("invalid state"), std::string("rank is not active"),
          "rank " + std::to_string(rank()) + " was taken out by deactivate_ranks"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  void comeBack() {
    const Status joined = line_->join(soon());
    EXPECT_TRUE(joined.ok()) << joined.error().message;
    EXPECT_FALSE(line_->isRemoved());
  }
  // Members: lets these ranks in.
  void letIn(const std::vector<int>& ranks) {
    const auto dropped = line_->recover(ranks, soon(), soon());
    ASSERT_TRUE(dropped.ok()) << dropped.error().message;
    EXPECT_TRUE(dropped->empty());
  }

  void letInReady() {
    std::vector<int> ranks;
    for (int r = 0; r < job_.size(); ++r) {
      if (line_->readyKey(r) != 0) ranks.push_back(r);
    }
    if (ranks.empty()) return;
    // None of them, if another change comes first.
    const auto dropped = line_->recover(ranks, soon(), soon());
    ASSERT_TRUE(dropped.ok()) << dropped.error().message;
  }

  std::function<void(Group& to, const std::vector<bool>& stays)> onMove;
  std::function<void()> beforeAlone;

 private:
  GroupOptions groupOptions() const {
    GroupOptions options{.name = "line",
                         .rank = rank(),
                         .size = job_.size(),
                         .env = job_.env(),
                         .mailboxBytes = kMailboxBytes,
                         .raises = raises_};
    options.globalRanks.resize(size_t(job_.size()));
    std::iota(options.globalRanks.begin(), options.globalRanks.end(), 0);
    return options;
  }
  Result<std::unique_ptr<Group>> makeAlone(GroupOptions options) {
    if (!alone_) {
      EngineOptions own{.jobKey = Bytes(32, std::byte{9}), .logName = "alone"};
      own.env.transports = {"inproc"};
      auto engine = Engine::create(std::move(own));
      if (!engine.ok()) return engine.error();
      auto alone = Membership::start(
          *engine,
          {.rank = rank(), .peers = std::vector<std::shared_ptr<Peer>>(size_t(job_.size()))});
      if (!alone.ok()) return alone.error();
      alone_ = *alone;
    }
    return Group::createWithin(alone_, std::move(options), soon());
  }

  Group& job_;
  const bool raises_;
  const std::shared_ptr<SeriesEvents> events_ =
      std::make_shared<SeriesEvents>([](const GroupView&, bool) {});
  std::mutex operation_;  // held while an operation runs, or the line moves
  std::shared_ptr<Membership> alone_;
  std::unique_ptr<GroupLine> line_;
};

class RemovalTest : public ::testing::TestWithParam<std::tuple<const char*, bool>> {
 protected:
  using Body = std::function<void(LineSide& side)>;
  // `all`: a bit of each rank.
  static void run(int size, const Body& body) {
    runRanks({.size = size, .transports = {std::get<0>(GetParam())}}, [&](Group& job) {
      LineSide side(job, std::get<1>(GetParam()));
      const auto all = side.call();
      ASSERT_TRUE(all.ok()) << all.error().message;
      ASSERT_EQ(*all, (int64_t(1) << size) - 1);
      body(side);
    });
  }
};

TEST_P(RemovalTest, ARankTakesItselfOutAndComesBack) {
  std::atomic<int> without = 0;
  run(3, [&](LineSide& side) {
    for (int round = 1; round <= 2; ++round) {
      if (side.rank() == 2) {
        side.takeOut({2});
        side.expectOut();
        EXPECT_TRUE(eventually([&] { return without == 2 * round; }));
        side.comeBack();
      } else {
        side.callUntil(0b011, 0b111);
        ++without;
        side.letIn({2});
      }
      side.callUntil(0b111, 0b011);
    }
  });
}

// The rank that asks, the rank that is taken out, and a third rank go on with their calls.
TEST_P(RemovalTest, AnotherRankTakesItOut) {
  for (const int caller : {0, 1}) {
    run(3, [&](LineSide& side) {
      const int leaver = 1 - caller;  // the lowest rank, too, which proposes
      const int64_t stay = 0b111 & ~(1 << leaver);
      if (side.rank() == caller) side.takeOut({leaver});
      if (side.rank() == leaver) {
        side.callUntilOut(0b111);
        side.expectOut();
        side.comeBack();
      } else {
        side.callUntil(stay, 0b111);
        side.letIn({leaver});
      }
      side.callUntil(0b111, stay);
    });
  }
}

TEST_P(RemovalTest, TwoRanksAreTakenOutAtOnce) {
  for (const bool byThemselves : {false, true}) {
    run(4, [&](LineSide& side) {
      const bool leaves = side.rank() == 1 || side.rank() == 2;
      if (byThemselves && leaves) side.takeItselfOut();
      if (!byThemselves && side.rank() == 3) side.takeOut({1, 2});
      if (leaves) {
        if (!byThemselves) side.callUntilOut(0b1111);
        side.expectOut();
        side.comeBack();
        for (;;) {
          const auto took = side.call();
          ASSERT_TRUE(took.ok()) << took.error().message;
          if (*took == 0b1111) return;
        }
      }
      for (int64_t missed = 0;;) {
        const auto took = side.call();
        ASSERT_TRUE(took.ok()) << took.error().message;
        if (*took == 0b1111 && missed == 0b0110) return;
        missed |= 0b1111 & ~*took;
        side.letInReady();
      }
    });
  }
}

// Two ranks that take each other out: one of them or both are out.
TEST_P(RemovalTest, TwoRanksTakeEachOtherOut) {
  run(3, [&](LineSide& side) {
    if (side.rank() < 2) {
      const Status removed = side.line().remove({1 - side.rank()}, soon());
      if (side.line().isRemoved() && !removed.ok() && !LineSide::isAnotherChange(removed))
        side.expectRefused(removed);
    }
    for (bool isWithout = false;;) {
      const auto took = side.call();
      if (!took.ok()) {
        side.expectOut();
        side.comeBack();
        isWithout = true;
        continue;
      }
      isWithout |= *took != 0b111;
      if (isWithout && *took == 0b111) return;
      std::vector<int> missing;
      for (int r = 0; r < 3; ++r) {
        if (!(*took >> r & 1)) missing.push_back(r);
      }
      if (!missing.empty()) (void)side.line().recover(missing, soon(), soon());
    }
  });
}

// The rank that is taken out has a part in the call that other members are in.
TEST_P(RemovalTest, TheCallThatOthersAreInComesFirst) {
  run(3, [&](LineSide& side) {
    const auto group = side.line().current();
    if (side.rank() == 0) {
      EXPECT_TRUE(eventually(
          [&] { return group->copyPart(2, 1).has_value() && group->copyPart(2, 2).has_value(); }));
      side.takeOut({2});
      EXPECT_EQ(side.line().current(), group) << "it has moved before the call";
    }
    EXPECT_EQ(*side.call(), 0b111);
    if (side.rank() == 2) {
      side.expectRefused(side.call().status());
      side.expectOut();
    } else {
      EXPECT_EQ(*side.call(), 0b011);
    }
  });
}

thread_local bool isBehind = false;
std::atomic<const Group*> behind;
std::atomic<bool> hasWaited;

// Rank 2 takes itself out while rank 0 is in a call. Rank 1 has stopped in the call before, which the
// other two have ended, and is about to read the part of rank 2.
TEST_P(RemovalTest, AMemberThatIsBehindIsWaitedFor) {
  if (std::get<0>(GetParam()) == std::string_view("tcp"))
    GTEST_SKIP() << "the threads that are held here would receive the calls";
  behind = nullptr;
  hasWaited = false;
  observeFailpoints([](const char* name) {
    const std::string_view point = name;
    const Group* const stopped = behind;
    if (point == "join" && stopped && stopped->agent().isFrozen())
      EXPECT_TRUE(eventually([&] { return stopped->copyPart(3, 0).has_value(); }));
    if (point == "adopt" && isBehind) EXPECT_TRUE(eventually([] { return hasWaited.load(); }));
  });
  run(3, [](LineSide& side) {
    const auto group = side.line().current();
    std::thread remover;
    if (side.rank() == 1) {
      behind = group.get();
      isBehind = true;
      remover = std::thread([&] {
        EXPECT_TRUE(eventually([&] { return group->copyPart(2, 1).has_value(); }));
        side.takeOut({2});
      });
    }
    if (side.rank() == 2) {
      EXPECT_TRUE(eventually([] { return behind && behind.load()->agent().state().hasReported; }));
    }
    EXPECT_EQ(*side.call(), 0b111);
    if (side.rank() == 1) behind = nullptr;
    if (side.rank() == 2) {
      EXPECT_TRUE(eventually([&] { return group->renewal().close().has_value(); }));
      const Status early = side.line().remove({2}, Deadline::after(std::chrono::milliseconds(20)));
      EXPECT_EQ(early.code(), ErrorCode::kTimeout);
      EXPECT_FALSE(side.line().isRemoved());
      hasWaited = true;
      side.takeOut({2});
      return side.expectOut();
    }
    EXPECT_EQ(*side.call(), 0b011);
    EXPECT_EQ(*side.call(), 0b011);
    if (remover.joinable()) remover.join();
  });
  observeFailpoints([](const char*) {});
}

thread_local bool leavesEarly = false, sendsReport = false;

// The connections of rank 2 break with its leave report.
TEST_P(RemovalTest, TheReportOfARankThatTakesItselfOutIsRepeated) {
  observeFailpoints([](const char* name) {
    const std::string_view point = name;
    leavesEarly = leavesEarly || point == "leaves-early";
    sendsReport = sendsReport || (leavesEarly && point == "leave");
    if (point == "tell" && std::exchange(sendsReport, false))
      SocketBreaker::breakAll(SocketBreaker::How::kReset);
  });
  std::atomic<int> done = 0;
  run(3, [&](LineSide& side) {
    auto group = side.line().current();
    if (side.rank() == 2) {
      for (const int r : {0, 1})
        EXPECT_TRUE(eventually([&] { return group->copyPart(2, r).has_value(); }));
      group.reset();
      side.takeOut({2});
      EXPECT_TRUE(eventually([&] { return done == 2; }));
      return side.expectOut();
    }
    EXPECT_EQ(*side.call(), 0b011);
    EXPECT_EQ(*side.call(), 0b011);
    ++done;
  });
  observeFailpoints([](const char*) {});
}

// A rank that does not get ready to go holds the removal up, and nothing has changed.
TEST_P(RemovalTest, ARankThatIsStuckIsNotTakenOut) {
  std::atomic<bool> isAsked = false, isOver = false;
  run(3, [&](LineSide& side) {
    if (side.rank() == 2) {
      side.beforeAlone = [&] {
        isAsked = true;
        EXPECT_TRUE(eventually([&] { return isOver.load(); }));
      };
    }
    EXPECT_EQ(*side.call(), 0b111);
    if (side.rank() == 0) {
      while (!isAsked) {
        const Status removed =
            side.line().remove({2}, Deadline::after(std::chrono::milliseconds(20)));
        ASSERT_EQ(removed.code(), ErrorCode::kTimeout);
        for (const char* part : {"has not taken rank 2 out", "Nothing has changed"})
          EXPECT_NE(removed.error().message.find(part), std::string::npos)
              << removed.error().message;
      }
    }
    for (int i = 0; i < 3; ++i) EXPECT_EQ(*side.call(), 0b111);
    isOver = true;
    EXPECT_FALSE(side.line().isRemoved());
  });
}

// Rank 1 announces a long message to rank 0.
class LongMessage {
 public:
  static constexpr size_t kBytes = 1 << 20;

  explicit LongMessage(LineSide& side)
      : messages(*side.line().current()), data_(kBytes, std::byte{1}) {
    if (side.rank() == 1) {
      sent_ = messages.send(data_, 0, 0, soon());
      (void)messages.send({}, 0, 1, soon());
    } else if (side.rank() == 0) {
      const auto behind = messages.receive({}, 1, 1, soon());
      EXPECT_TRUE(messages.wait(*behind, soon()));
      EXPECT_TRUE(behind->status().ok());
    }
  }
  ~LongMessage() { end({ErrorCode::kAborted, "the test is over"}); }
  // `onAborted`: the peer knows of it soon.
  void end(
      const Error& why, const std::function<void()>& onAborted = [] {}) {
    if (std::exchange(hasEnded_, true)) return;
    messages.abort(why);
    onAborted();
    EXPECT_TRUE(messages.close(soon()));
  }
  void giveUp() { messages.cancel(*sent_, {ErrorCode::kAborted, "interrupted"}); }
  std::shared_ptr<Message> receive(size_t bytes = kBytes) {
    return messages.receive(std::span(data_).first(bytes), 1, 0, soon());
  }

  PointToPoint messages;

 private:
  std::vector<std::byte> data_;
  std::shared_ptr<Message> sent_;
  bool hasEnded_ = false;
};

// Rank 0 knows that the series closes, and not yet that rank 1 has left it.
thread_local bool looksLate = false;
std::atomic<bool> isLooking, hasAborted;

TEST_P(RemovalTest, AMessageThatTheLeaverGivesUpIsLost) {
  isLooking = hasAborted = false;
  observeFailpoints([](const char* name) {
    if (looksLate && std::strcmp(name, "message-fetch") == 0) {
      isLooking = true;
      EXPECT_TRUE(eventually([] { return hasAborted.load(); }));
    }
  });
  run(2, [](LineSide& side) {
    LongMessage message(side);
    side.onMove = [&](Group& to, const std::vector<bool>& stays) {
      if (side.rank() == 1) {
        EXPECT_TRUE(eventually([] { return isLooking.load(); }));
        return message.end(to.usable().error(), [] { hasAborted = true; });
      }
      looksLate = true;
      const auto received = message.receive();
      looksLate = false;
      EXPECT_TRUE(message.messages.wait(*received, soon()));
      EXPECT_EQ(received->status().code(), ErrorCode::kPeerLost)
          << received->status().error().message;
      message.messages.move(to, stays);
    };
    if (side.rank() == 0) side.takeOut({1});
    EXPECT_TRUE(eventually([&] { return side.line().series() == 2; }));
  });
  observeFailpoints([](const char*) {});
}

// Its sender goes on in the successor, so it has given up this message alone.
TEST_P(RemovalTest, AMessageThatAMemberGivesUpIsRefused) {
  std::atomic<bool> isGivenUp = false, isOver = false;
  run(3, [&](LineSide& side) {
    LongMessage message(side);
    side.onMove = [&](Group& to, const std::vector<bool>& stays) {
      if (side.rank() == 2) return message.end(to.usable().error());
      if (side.rank() == 1) {
        message.giveUp();
        isGivenUp = true;
        return message.messages.move(to, stays);
      }
      EXPECT_TRUE(eventually([&] { return isGivenUp.load(); }));
      const auto received = message.receive();
      EXPECT_FALSE(received->finished());
      message.messages.move(to, stays);
      EXPECT_TRUE(message.messages.wait(*received, soon()));
      EXPECT_EQ(received->status().code(), ErrorCode::kRefused)
          << received->status().error().message;
      isOver = true;
    };
    if (side.rank() == 0) side.takeOut({2});
    EXPECT_TRUE(eventually([&] { return side.line().series() == 2 && isOver; }));
  });
}

// A receive that ends with an error while it fetches takes its message with it.
TEST_P(RemovalTest, AMessageThatIsBeingFetchedIsLost) {
  std::atomic<bool> isMoving = false, isHeld = false, isOver = false;
  run(2, [&](LineSide& side) {
    LongMessage message(side);
    side.onMove = [&](Group& to, const std::vector<bool>& stays) {
      if (side.rank() == 1) {
        EXPECT_TRUE(eventually([&] { return isMoving.load(); }));
        side.job().membership()->engine().loop().runAt(
            Deadline::after(Clock::duration::zero()), [&] {
              isHeld = true;
              EXPECT_TRUE(eventually([&] { return isOver.load(); }));
            });
        EXPECT_TRUE(eventually([&] { return isOver.load(); }));
        return message.end(to.usable().error());
      }
      isMoving = true;
      EXPECT_TRUE(eventually([&] { return isHeld.load(); }));
      const auto first = message.receive();
      message.messages.move(to, stays);
      const auto second = message.receive(LongMessage::kBytes / 2);
      EXPECT_TRUE(message.messages.wait(*second, soon()));
      const bool isCopied = first->status().ok();  // from mapped memory, at once
      EXPECT_TRUE(isCopied || first->status().code() == ErrorCode::kPeerLost);
      EXPECT_EQ(second->status().code(), ErrorCode::kPeerLost) << second->status().error().message;
      isOver = true;
    };
    if (side.rank() == 0) side.takeOut({1});
    EXPECT_TRUE(eventually([&] { return side.line().series() == 2; }));
  });
}

INSTANTIATE_TEST_SUITE_P(Wires, RemovalTest,
                         ::testing::Combine(::testing::Values("inproc", "shm", "tcp"),
                                            ::testing::Bool()),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param)) +
                                  (std::get<1>(param.param) ? "_raise" : "");
                         });

}  // namespace
}  // namespace mooncake::test
