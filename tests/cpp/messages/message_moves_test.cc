// Messages cross from one group to its successor. Two groups of the same ranks, one made after the
// other in one job, play the group and its successor.
#include <algorithm>
#include <atomic>
#include <gtest/gtest.h>
#include <latch>
#include <memory>
#include <thread>

#include "collectives/collectives.h"
#include "collectives/point_to_point.h"
#include "collectives/rma_window.h"
#include "ranks_in_threads.h"
#include "socket_breaker.h"

namespace mooncake::test {
namespace {

using namespace std::chrono_literals;

constexpr size_t kSmall = 100, kLarge = kCellPayload + 1000;

Bytes contents(size_t bytes, int salt) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = std::byte((i * 7 + size_t(salt) * 31) % 251);
  return data;
}

// The groups that follow one another, and their messages, as one rank sees them.
class Line {
 public:
  explicit Line(Group& first)
      : first_(first),
        messages(std::make_unique<PointToPoint>(first)),
        all(size_t(first.size()), true) {}
  ~Line() {
    messages->abort({ErrorCode::kAborted, "the end"});
    messages.reset();
  }

  Group& group() const { return group_ ? *group_ : first_; }
  // Makes the successor. Collective over the ranks that are left. `absent`: ranks that had no holder
  // any more when the term began.
  void prepare(const std::vector<int>& absent = {}) {
    const auto job = first_.membership();
    std::vector<int> ranks;
    for (int r = 0; r < first_.size(); ++r) ranks.push_back(r);
    const auto topics = job->newTopics("test", ranks);
    ASSERT_TRUE(topics.ok()) << topics.error().message;
    auto roster = std::make_shared<Roster>(*job->roster());
    for (const int r : absent) {
      roster->term.holders[size_t(r)].reset();
      roster->peers[size_t(r)] = nullptr;
    }
    auto made = Group::createOn(job,
                                {.name = "test",
                                 .rank = first_.rank(),
                                 .size = first_.size(),
                                 .env = first_.env(),
                                 .mailboxBytes = kMailboxBytes,
                                 .bell = first_.bell()},
                                *topics, roster, soon());
    ASSERT_TRUE(made.ok()) << made.error().message;
    next_ = std::move(*made);
  }
  // Goes on with the successor, and destroys the group before it.
  void move(const std::vector<bool>& stays) {
    messages->move(*next_, stays);
    group_ = std::move(next_);
  }
  void move() { move(all); }
  // Plays another process at this rank: begins anew in the successor.
  void beginAnew() {
    messages->abort({ErrorCode::kAborted, "another process takes this rank"});
    ASSERT_TRUE(messages->close(soon()));
    messages = std::make_unique<PointToPoint>(*next_);
    group_ = std::move(next_);
  }

  std::shared_ptr<Message> send(const Bytes& data, int to, uint32_t tag) {
    auto owner = std::make_shared<const Bytes>(data);
    const Bytes& bytes = *owner;
    return messages->send(bytes, to, tag, soon(), nullptr, std::move(owner));
  }
  void expectSent(const std::shared_ptr<Message>& message) {
    ASSERT_TRUE(messages->wait(*message, soon()));
    EXPECT_TRUE(message->status().ok()) << message->status().error().message;
  }
  void expectReceived(const std::shared_ptr<Message>& message, int from) {
    expectSent(message);
    EXPECT_EQ(message->peer(), from);
  }
  // Receives a message of this content. `source`: `from`, or any.
  void expect(const Bytes& data, int from, uint32_t tag, int source) {
    Bytes received(data.size());
    expectReceived(messages->receive(received, source, tag, soon()), from);
    EXPECT_EQ(received, data) << "from " << from << " with tag " << tag;
  }
  void expect(const Bytes& data, int from, uint32_t tag) { expect(data, from, tag, from); }
  void expectLost(const std::shared_ptr<Message>& message) {
    ASSERT_TRUE(messages->wait(*message, soon()));
    EXPECT_EQ(message->status().code(), ErrorCode::kPeerLost) << message->operation();
  }
  template <typename Condition>
  void driveUntil(Condition condition) {
    for (const Deadline deadline = soon(); !condition();) {
      ASSERT_FALSE(deadline.passed());
      messages->progress();
      std::this_thread::yield();
    }
  }

 private:
  Group& first_;
  std::unique_ptr<Group> group_;  // null: the first one
  std::unique_ptr<Group> next_;

 public:
  std::unique_ptr<PointToPoint> messages;
  const std::vector<bool> all;
};

// A place where ranks wait for each other. They drive their messages meanwhile.
class Together {
 public:
  explicit Together(int size) : size_(size) {}
  void meet(Line& line) {
    const int end = (arrived_++ / size_ + 1) * size_;
    line.driveUntil([&] { return arrived_ >= end; });
  }

 private:
  const int size_;
  std::atomic<int> arrived_{0};
};

// Sends small and large messages to a rank, and receives as many from it. They arrive in order.
void exchange(Line& line, int peer, int salt, int count = 30) {
  const int self = line.group().rank();
  const auto content = [&](int from, int n) {
    return contents(n % 4 == 0 ? kLarge + size_t(n) : kSmall + size_t(n), salt + from * 57 + n);
  };
  std::vector<std::shared_ptr<Message>> sent;
  for (int n = 0; n < count; ++n) sent.push_back(line.send(content(self, n), peer, 1));
  for (int n = 0; n < count; ++n) line.expect(content(peer, n), peer, 1);
  for (const auto& one : sent) line.expectSent(one);
}

class MessagesMove : public testing::TestWithParam<const char*> {
 protected:
  void run(int size, const std::function<void(Line&, Together&)>& body) const {
    Together together(size);
    runRanks({.size = size, .transports = {GetParam()}, .failureTimeout = 20s}, [&](Group& group) {
      Line line(group);
      body(line, together);
      together.meet(line);  // no rank leaves before
    });
  }
};

// Some wait for a cell, some lie in a cell, some were taken out, some are announced, some receives
// wait. One rank has looked at its mailbox, the other one has not.
TEST_P(MessagesMove, InEveryState) {
  run(2, [](Line& line, Together& together) {
    const int self = line.group().rank(), peer = 1 - self;
    constexpr int kMany = 3 * int(kMailboxCells);
    Bytes late(kSmall);
    for (int round = 0; round < 3; ++round) {
      SCOPED_TRACE(round);
      const auto salt = [&](int from, int n) { return round * 100 + from * 1000 + n; };
      std::vector<std::shared_ptr<Message>> sent;
      for (int n = 0; n < 3; ++n)
        sent.push_back(line.send(contents(kLarge, salt(self, n)), peer, 2));
      sent.push_back(line.send(contents(kSmall, salt(self, 3)), peer, 3));
      for (int n = 10; n < 10 + kMany; ++n)
        sent.push_back(line.send(contents(kSmall, salt(self, n)), peer, 1));
      line.driveUntil([&] { return sent[3]->wasSent(); });
      together.meet(line);
      const int looks = round % 2;
      std::shared_ptr<Message> waits;
      if (self == looks) {
        waits = line.messages->receive(late, PointToPoint::kAnySource, 4, soon());
      }
      line.prepare();
      line.move();
      if (self != looks) waits = line.messages->receive(late, PointToPoint::kAnySource, 4, soon());
      sent.push_back(line.send(contents(kLarge, salt(self, 90)), peer, 2));
      line.expect(contents(kSmall, salt(peer, 3)), peer, 3, PointToPoint::kAnySource);
      for (int n = 10; n < 10 + kMany; ++n) line.expect(contents(kSmall, salt(peer, n)), peer, 1);
      EXPECT_FALSE(waits->finished());
      together.meet(line);
      sent.push_back(line.send(contents(kSmall, salt(self, 4)), peer, 4));
      line.expectReceived(waits, peer);
      EXPECT_EQ(late, contents(kSmall, salt(peer, 4)));
      for (const int n : {0, 1, 2, 90}) line.expect(contents(kLarge, salt(peer, n)), peer, 2);
      for (const auto& one : sent) line.expectSent(one);
    }
    // No message came twice.
    for (const uint32_t tag : {1, 2, 3, 4}) {
      const auto last = line.send(contents(kSmall, int(tag)), peer, tag);
      line.expect(contents(kSmall, int(tag)), peer, tag);
      line.expectSent(last);
    }
    line.driveUntil([&] { return line.messages->progress(); });
  });
}

TEST_P(MessagesMove, WhileThePeerIsStillInTheGroupBefore) {
  run(3, [](Line& line, Together& together) {
    const int self = line.group().rank();
    for (int first = 0; first < 3; ++first) {
      line.prepare();
      if (self == first) line.move();
      together.meet(line);
      for (int peer = 0; peer < 3; ++peer) {
        if (peer != self) exchange(line, peer, first);
      }
      together.meet(line);
      if (self != first) line.move();
    }
  });
}

// A thread waits for a message in a group that is gone when the message comes.
TEST_P(MessagesMove, UnderThreadsThatWait) {
  run(2, [](Line& line, Together& together) {
    const int self = line.group().rank(), peer = 1 - self;
    for (int round = 0; round < 4; ++round) {
      std::vector<std::thread> waiters;
      for (const uint32_t tag : {7, 8}) {
        waiters.emplace_back([&, tag] {
          line.expect(contents(kLarge, round), peer, tag,
                      tag == 7 ? PointToPoint::kAnySource : peer);
        });
      }
      line.driveUntil([&] { return line.messages->drivers() >= 2; });
      line.prepare();
      line.move();
      together.meet(line);
      for (const uint32_t tag : {7, 8})
        line.expectSent(line.send(contents(kLarge, round), peer, tag));
      for (auto& waiter : waiters) waiter.join();
    }
  });
}

// Rank 2 ends, and its seat stays empty.
TEST_P(MessagesMove, WithoutARankThatEndedBefore) {
  for (const bool stays : {false, true}) {
    SCOPED_TRACE(stays);
    Together all(3), two(2);
    runRanks({.size = 3, .transports = {GetParam()}, .failureTimeout = 20s}, [&](Group& group) {
      auto line = std::make_unique<Line>(group);
      const int self = group.rank(), peer = 1 - self;
      Bytes never(kSmall), any(kSmall);
      if (self == 2) {
        const auto announced = line->send(contents(kLarge, 1), 0, 9);
        line->driveUntil([&] { return announced->wasSent(); });
        all.meet(*line);
        return;
      }
      const auto lost = line->messages->receive(never, 2, 5, soon());
      const auto waits = line->messages->receive(any, PointToPoint::kAnySource, 6, soon());
      const auto announced = line->send(contents(kLarge, self), 2, 5);
      const auto crosses = line->send(contents(kLarge, self), peer, 1);
      line->driveUntil([&] { return announced->wasSent() && crosses->wasSent(); });
      all.meet(*line);
      line->expectLost(lost);
      line->expectLost(announced);
      line->prepare(stays ? std::vector{2} : std::vector<int>());
      line->move({true, true, stays});
      EXPECT_FALSE(waits->finished());
      for (const size_t bytes : {kSmall, kLarge})
        line->expectLost(line->send(contents(bytes, 1), 2, 5));
      line->expectLost(line->messages->receive(never, 2, 11, soon()));
      if (self == 0) {  // its announced message cannot be fetched any more
        Bytes large(kLarge);
        for (int n = 0; n < 2; ++n) line->expectLost(line->messages->receive(large, 2, 9, soon()));
      }
      line->expect(contents(kLarge, peer), peer, 1);
      line->expectSent(crosses);
      exchange(*line, peer, 3);
      const auto sent = line->send(contents(kSmall, self), peer, 6);
      line->expectReceived(waits, peer);
      line->expectSent(sent);
      line->driveUntil([&] { return line->messages->progress(); });
      two.meet(*line);
    });
  }
}

// Rank 2 has a new holder: nothing of its predecessor's messages is left, and the messages between
// the other two are not touched.
TEST_P(MessagesMove, WithANewHolderOfARank) {
  run(3, [](Line& line, Together& together) {
    const int self = line.group().rank();
    std::weak_ptr<Window> mailboxes;
    for (int round = 0; round < 3; ++round) {
      SCOPED_TRACE(round);
      const int newcomer = 2 - round % 2, peer = 3 - newcomer - self;  // of ranks that stay
      std::vector<bool> stays(3, true);
      stays[size_t(newcomer)] = false;
      Bytes never(kSmall), any(kSmall);
      if (self == newcomer) {
        // Of the predecessor: taken out, in a cell, and announced.
        for (int r = 0; r < 3; ++r) {
          if (r == self) continue;
          line.expectSent(line.send(contents(kSmall, -1), r, 5));
          line.expectSent(line.send(contents(kSmall, -1), r, 6));
          const auto announced = line.send(contents(kLarge, -1), r, 5);
          line.driveUntil([&] { return announced->wasSent(); });
        }
        together.meet(line);
        line.prepare();
        together.meet(line);
        line.beginAnew();
        for (int r = 0; r < 3; ++r) {
          if (r != self) exchange(line, r, round);
        }
        for (int r = 0; r < 3; ++r) {
          if (r == self) continue;
          line.expectSent(line.send(contents(kSmall, round + r), r, 5));
          line.expectSent(line.send(contents(kSmall, round + r), r, 7));
        }
        together.meet(line);
        continue;
      }
      together.meet(line);
      const auto crosses = line.send(contents(kLarge, self), peer, 9);
      const auto lost = line.messages->receive(never, newcomer, 8, soon());
      const auto announced = line.send(contents(kLarge, self), newcomer, 5);
      const auto waits = line.messages->receive(any, PointToPoint::kAnySource, 7, soon());
      line.driveUntil([&] { return announced->wasSent() && crosses->wasSent(); });
      line.prepare();
      line.move(stays);
      // The first successor's mailboxes last as long as two ranks that met there are left.
      if (round == 0) mailboxes = line.group().mailboxes();
      if (round == 1 && self == 0) {
        EXPECT_FALSE(mailboxes.expired());
      }
      for (const auto& one : {lost, announced}) {
        ASSERT_TRUE(one->finished());
        EXPECT_EQ(one->status().code(), ErrorCode::kPeerLost);
      }
      together.meet(line);
      for (int r = 0; r < 3; ++r) {
        if (r != self) exchange(line, r, round);
      }
      line.expect(contents(kSmall, round + self), newcomer, 5);
      line.expectReceived(waits, newcomer);
      EXPECT_EQ(any, contents(kSmall, round + self));
      line.expect(contents(kLarge, peer), peer, 9);
      line.expectSent(crosses);
      line.driveUntil([&] { return line.messages->progress(); });
      together.meet(line);
    }
    // Rank 2 was new in rounds 0 and 2, rank 1 in round 1.
    if (self == 0) {
      EXPECT_TRUE(mailboxes.expired());
    }
  });
}

// One rank leaves in the successor, and is heard by a peer that is not there yet.
TEST_P(MessagesMove, AndARankLeavesAfterIt) {
  run(2, [](Line& line, Together& together) {
    const int peer = 1 - line.group().rank();
    line.prepare();
    if (line.group().rank() == 0) {
      line.move();
      line.expectSent(line.send(contents(kSmall, 1), peer, 1));
      line.messages->abort({ErrorCode::kAborted, "left"});
      together.meet(line);
      return;
    }
    Bytes never(kSmall);
    const auto lost = line.messages->receive(never, peer, 2, soon());
    line.expectLost(lost);
    EXPECT_NE(lost->status().error().message.find("it has left the group"), std::string::npos)
        << lost->status().error().message;
    line.move();
    line.expect(contents(kSmall, 1), peer, 1);
    line.expectLost(line.messages->receive(never, peer, 1, soon()));
    line.expectLost(line.send(never, peer, 1));
    together.meet(line);
  });
}

// Two ranks that met in the successor hear when one of them leaves.
TEST_P(MessagesMove, AndARankLeavesThatItsPeerMetAfterwards) {
  for (const int leaver : {0, 1}) {
    SCOPED_TRACE(leaver);
    run(2, [&](Line& line, Together& together) {
      const int self = line.group().rank(), peer = 1 - self;
      line.prepare();
      self == 0 ? line.move({true, false}) : line.beginAnew();
      if (self == leaver) {
        line.expectSent(line.send(contents(kSmall, 1), peer, 1));
        line.messages->abort({ErrorCode::kAborted, "left"});
      } else {
        line.expect(contents(kSmall, 1), peer, 1);
        Bytes never(kSmall);
        line.expectLost(line.messages->receive(never, peer, 1, soon()));
      }
      together.meet(line);
    });
  }
}

// Puts and signals cross like messages.
TEST_P(MessagesMove, WithPutsAndSignals) {
  run(2, [](Line& line, Together& together) {
    Bytes memory(2 * kLarge);
    auto window = RmaWindow::open(line.group(), *line.messages, {memory, {int64_t(memory.size())}},
                                  DType::kUInt8, soon());
    ASSERT_TRUE(window.ok());
    const int self = line.group().rank(), peer = 1 - self;
    for (int round = 0; round < 3; ++round) {
      const Bytes large = contents(kLarge, round + self), small = contents(kSmall, round + self);
      const auto one = (*window)->put(large, peer, 0, soon());
      const auto two = (*window)->put(small, peer, kLarge, soon());
      const auto three = (*window)->signal(peer, soon());
      ASSERT_TRUE(one.ok() && two.ok() && three.ok());
      line.prepare();
      line.move();
      line.expectSent((*window)->awaitSignal(peer, soon()));
      for (const auto& put : {*one, *two, *three}) line.expectSent(put);
      EXPECT_TRUE(
          std::ranges::equal(std::span(memory).first(kLarge), contents(kLarge, round + peer)));
      EXPECT_TRUE(std::ranges::equal(std::span(memory).subspan(kLarge, kSmall),
                                     contents(kSmall, round + peer)));
      together.meet(line);
    }
    // Rank 1 has another holder, whose first window has the number of the old one.
    const bool isNew = self == 1;
    if (isNew) window->reset();
    line.prepare();
    if (isNew) {
      line.beginAnew();
    } else {
      line.move({true, false});
    }
    Bytes untouched(kSmall);
    if (isNew) {
      auto opened = line.messages->openWindow(untouched);
      ASSERT_TRUE(opened.ok());
      EXPECT_EQ(*opened, 1u);
    }
    together.meet(line);
    if (!isNew) {
      const auto put = (*window)->put(contents(kSmall, 1), peer, 0, soon());
      const auto signal = (*window)->signal(peer, soon());
      ASSERT_TRUE(put.ok() && signal.ok());
      for (const auto& refused : {*put, *signal, (*window)->awaitSignal(peer, soon())}) {
        ASSERT_TRUE(line.messages->wait(*refused, soon()));
        EXPECT_EQ(refused->status().code(), ErrorCode::kInvalidArgument) << refused->operation();
      }
      line.expectSent(line.send(contents(kSmall, 1), peer, 1));
    } else {
      line.expect(contents(kSmall, 1), peer, 1);
      EXPECT_EQ(untouched, Bytes(kSmall));
    }
    together.meet(line);
    window->reset();
  });
}

// Places of tables and of the arena are used again.
TEST_P(MessagesMove, FiftyTimesWithoutGrowth) {
  run(2, [](Line& line, Together& together) {
    const int peer = 1 - line.group().rank();
    Engine& engine = line.group().engine();
    struct Places {
      uint64_t region = 0, lease = 0, block = 0;
    } early, late;
    const auto note = [&](Places& most) {
      engine.retire({}, [] { return true; });
      auto block = engine.allocate(4096);
      ASSERT_TRUE(block.ok());
      auto region = engine.regions().add(block->data(), block->bytes(), kRemoteRead);
      auto lease = engine.leases().take();
      ASSERT_TRUE(region.ok() && lease.ok());
      most.region = std::max(most.region, region->remote().key & 0xffffffff);
      most.lease = std::max(most.lease, lease->describe().offset);
      most.block = std::max(most.block, block->offset());
    };
    for (int move = 0; move < 50; ++move) {
      const bool isReplaced = move % 2 == 1;  // rank 1
      std::shared_ptr<Message> crosses;
      if (!isReplaced) crosses = line.send(contents(kLarge, move), peer, 1);
      line.prepare();
      if (!isReplaced) {
        line.move();
      } else if (peer == 1) {
        line.move({true, false});
      } else {
        line.beginAnew();
      }
      if (!crosses) crosses = line.send(contents(kLarge, move), peer, 1);
      line.expect(contents(kLarge, move), peer, 1);
      line.expectSent(crosses);
      together.meet(line);  // both have let go of the group before
      note(move < 20 ? early : late);
      together.meet(line);
    }
    // Far fewer than the 30 moves in between. What other threads hold at the moment varies.
    EXPECT_LE(late.region, early.region + 10);
    EXPECT_LE(late.lease, early.lease + 10 * sizeof(uint64_t));
    EXPECT_LE(late.block, early.block + 10 * 4096);
  });
}

INSTANTIATE_TEST_SUITE_P(Wires, MessagesMove,
                         testing::Values("inproc", "shm", "tcp", "sim", "fabric"));

// Connections break all the time. Each rank moves when it likes.
class MovesOverBadConnections : public testing::TestWithParam<std::tuple<const char*, uint64_t>> {};

TEST_P(MovesOverBadConnections, EveryMessageComesOnce) {
  const auto& [wire, seed] = GetParam();
  constexpr int kMoves = 6;
  std::latch ready(3), done(3);
  std::unique_ptr<Troublemaker> trouble;
  runRanks({.size = 3, .transports = {wire}, .failureTimeout = 20s, .simSeed = seed},
           [&, seed = seed](Group& group) {
             Line line(group);
             const int self = group.rank();
             ready.arrive_and_wait();
             if (self == 0 && wire == std::string("tcp"))
               trouble = std::make_unique<Troublemaker>(seed, 1ms, 8ms);
             std::vector<std::thread> threads;
             for (int peer = 0; peer < 3; ++peer) {
               if (peer == self) continue;
               threads.emplace_back([&, peer] {
                 for (int round = 0; round < 12; ++round) exchange(line, peer, round, 20);
               });
             }
             for (int move = 0; move < kMoves; ++move) {
               line.prepare();
               line.move();
             }
             for (auto& thread : threads) thread.join();
             done.arrive_and_wait();
             if (trouble && self == 0) {
               trouble->stop();
               EXPECT_GT(trouble->broken(), 0u);
             }
             for (int peer = 0; peer < 3; ++peer) {
               if (peer != self) exchange(line, peer, 99, 5);
             }
             EXPECT_TRUE(barrier(group, soon()).ok());
           });
}

INSTANTIATE_TEST_SUITE_P(Wires, MovesOverBadConnections,
                         testing::Combine(testing::Values("tcp", "sim"), testing::Values(1, 2, 3)));

}  // namespace
}  // namespace mooncake::test
