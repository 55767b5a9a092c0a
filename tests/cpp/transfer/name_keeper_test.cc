#include "transfer/name_keeper.h"

#include <atomic>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <map>
#include <thread>

#include "engine/route.h"

// NameKeeper beside a metadata server in this process, which can forget, stall and be written by
// others.
namespace mooncake::transfer {
namespace {

using std::chrono_literals::operator""s;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""h;

constexpr const char* kName = "decoder:1";

EngineId idOf(int number) { return EngineId{std::byte(number)}; }

NameRecord recordOf(int number, bool isOurMake = true) {
  NameRecord record{.session = "10.0.0." + std::to_string(number) + ":15000",
                    .incarnation = *incarnationOf(encodeEndpoint(idOf(number), {})),
                    .isOurMake = isOurMake,
                    .tag = {}};
  if (!isOurMake) record.incarnation.clear();
  return record;
}

SegmentDescription descriptionOf(int number, const std::string& name) {
  return {
      .name = name, .protocol = "tcp", .endpoint = encodeEndpoint(idOf(number), {}), .buffers = {}};
}

bool comesTrue(const std::function<bool()>& condition) {
  const auto deadline = Deadline::after(20s);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

class Server final : public Metadata {
 public:
  bool namesAreSessions() const override { return false; }
  Result<NameRecord> find(const std::string&, Deadline) const override {
    std::lock_guard lock(mutex_);
    if (!record_) return Error{ErrorCode::kMismatch, "no such name"};
    return *record_;
  }
  Result<bool> put(const std::string&, const NameRecord& record, const NameRecord* seen,
                   Deadline deadline) override {
    if (beforePut) beforePut();
    stall(deadline);
    std::lock_guard lock(mutex_);
    if (isDown) return Error{ErrorCode::kMismatch, "connection refused"};
    const bool isOurs = record_ && record_->session == record.session;
    if (record_ && !isOurs && (!seen || seen->tag != record_->tag)) return false;
    write(record);
    return true;
  }
  void erase(const std::string&, const NameRecord& record, Deadline deadline) override {
    stall(deadline);
    std::lock_guard lock(mutex_);
    if (record_ && record_->session == record.session) record_.reset();
  }

  void set(NameRecord record) {
    std::lock_guard lock(mutex_);
    write(std::move(record));
  }
  void forget() {
    std::lock_guard lock(mutex_);
    record_.reset();
  }
  std::string session() const {
    std::lock_guard lock(mutex_);
    return record_ ? record_->session : std::string();
  }

  std::function<void()> beforePut;
  std::atomic<bool> isDown{false};
  std::atomic<bool> isStalled{false};  // requests end at their deadline

 private:
  void stall(Deadline deadline) const {
    if (isStalled) std::this_thread::sleep_until(deadline.when());
  }
  void write(NameRecord record) {
    record_ = std::move(record);
    record_->tag = std::to_string(++tags_);
  }

  mutable std::mutex mutex_;  // guards all below
  std::optional<NameRecord> record_;
  int tags_ = 0;
};

Result<SegmentDescription> nobodyListens(const std::string&, Deadline) {
  return Error{ErrorCode::kPeerLost, "connection refused"};
}

NameKeeper::Options optionsOf(int number) {
  return {.name = kName,
          .record = recordOf(number),
          .logName = "test",
          .patience = 5s,
          .period = 1h,
          .leastPause = 0ms};
}

TEST(NameKeeper, PublishesAgainWhenTheServerHasForgotten) {
  Server server;
  auto options = optionsOf(1);
  options.period = 10ms;
  NameKeeper keeper(server, nobodyListens, options);
  ASSERT_TRUE(keeper.publish().ok());
  for (int round = 0; round < 3; ++round) {
    server.isDown = true;
    server.forget();
    EXPECT_EQ(server.session(), "");
    server.isDown = false;
    EXPECT_TRUE(comesTrue([&] { return server.session() == options.record.session; }));
  }
}

TEST(NameKeeper, ARegistrationPublishesAgain) {
  Server server;
  NameKeeper keeper(server, nobodyListens, optionsOf(1));
  ASSERT_TRUE(keeper.publish().ok());
  for (int round = 0; round < 3; ++round) {
    server.forget();
    keeper.renewSoon();
    EXPECT_TRUE(comesTrue([&] { return !server.session().empty(); }));
  }
}

// The deletion must not overtake a record that is still being written.
TEST(NameKeeper, NothingIsPublishedBehindItsRetraction) {
  Server server;
  NameKeeper keeper(server, nobodyListens, optionsOf(1));
  ASSERT_TRUE(keeper.publish().ok());
  std::promise<void> begun, released;
  server.beforePut = [&, isFirst = true]() mutable {
    if (!std::exchange(isFirst, false)) return;
    begun.set_value();
    released.get_future().wait();
  };
  keeper.renewSoon();
  begun.get_future().wait();
  auto retracted = std::async(std::launch::async, [&] { keeper.retract(); });
  EXPECT_TRUE(comesTrue([&] { return keeper.isRetracted(); }));
  released.set_value();
  retracted.wait();
  EXPECT_EQ(server.session(), "");
  keeper.renewSoon();
  keeper.retract();
  EXPECT_EQ(server.session(), "");
}

// The attempt in flight and the deletion share one deadline.
TEST(NameKeeper, AStalledServerHoldsARetractionUpForOnePatience) {
  Server server;
  auto options = optionsOf(1);
  options.patience = 1s;
  NameKeeper keeper(server, nobodyListens, options);
  ASSERT_TRUE(keeper.publish().ok());
  std::promise<void> begun;
  server.isStalled = true;
  server.beforePut = [&] { begun.set_value(); };
  keeper.renewSoon();
  begun.get_future().wait();
  const auto start = Clock::now();
  keeper.retract();
  const auto took = Clock::now() - start;
  EXPECT_GT(took, 500ms);
  EXPECT_LT(took, 1500ms);
}

TEST(NameKeeper, TheRecordOfAnotherEngineStays) {
  Server server;
  {
    NameKeeper keeper(server, nobodyListens, optionsOf(1));
    ASSERT_TRUE(keeper.publish().ok());
    server.set(recordOf(2));
  }
  EXPECT_EQ(server.session(), recordOf(2).session);
}

TEST(NameKeeper, ANameIsTakenOverFromAnEngineThatDoesNotAnswerForIt) {
  struct Case {
    const char* what;
    NameRecord there;
    Result<SegmentDescription> answer;
    bool isTakenOver;
  };
  NameRecord older = recordOf(2);
  older.incarnation.clear();
  const auto aged = [](int seconds, NameRecord record) {
    record.age = std::chrono::seconds(seconds);
    return record;
  };
  const auto error = [](ErrorCode code) { return Error{code, "why"}; };
  const Case cases[] = {
      {"it answers", recordOf(2), descriptionOf(2, kName), false},
      {"nothing listens", recordOf(2), error(ErrorCode::kPeerLost), true},
      {"another engine listens at its port", recordOf(2), descriptionOf(3, "other:1"), true},
      {"so does one with its name", recordOf(2), descriptionOf(3, kName), true},
      {"an HTTP server listens", recordOf(2), error(ErrorCode::kProtocol), true},
      {"it is stopped", recordOf(2), error(ErrorCode::kTimeout), false},
      {"it has another key", recordOf(2), error(ErrorCode::kRefused), false},
      {"it cannot be reached", recordOf(2), error(ErrorCode::kSystem), false},
      {"nor reached, but it publishes", aged(30, recordOf(2)), error(ErrorCode::kSystem), false},
      {"nor reached, nor does it publish", aged(31, recordOf(2)), error(ErrorCode::kSystem), true},
      {"it publishes no more, and is stopped", aged(99, recordOf(2)), error(ErrorCode::kTimeout),
       false},
      {"without one, nor reached", aged(99, older), error(ErrorCode::kSystem), false},
      {"Mooncake's, not reached", aged(99, recordOf(2, false)), error(ErrorCode::kSystem), false},
      {"without an incarnation: it answers", older, descriptionOf(2, kName), false},
      {"without one: another engine", older, descriptionOf(3, "other:1"), true},
      {"Mooncake's, killed", recordOf(2, false), error(ErrorCode::kPeerLost), true},
      {"Mooncake's, alive", recordOf(2, false), error(ErrorCode::kRefused), false},
      {"Mooncake's, or garbage", recordOf(2, false), error(ErrorCode::kProtocol), false},
      {"Mooncake's, ours at its port", recordOf(2, false), descriptionOf(3, "other:1"), true},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.what);
    Server server;
    server.set(one.there);
    NameKeeper keeper(
        server, [&](const std::string&, Deadline) { return one.answer; }, optionsOf(1));
    const Status published = keeper.publish();
    EXPECT_EQ(published.ok(), one.isTakenOver);
    EXPECT_EQ(server.session(), one.isTakenOver ? recordOf(1).session : one.there.session);
    if (!published.ok()) {
      EXPECT_NE(published.error().message.find("is taken"), std::string::npos);
    }
  }
}

// Two engines see the same record of a dead one: the second must not overwrite the first.
TEST(NameKeeper, ARecordThatHasChangedMeanwhileIsNotOverwritten) {
  Server server;
  server.set(recordOf(2));
  int asked = 0;
  const auto ask = [&](const std::string& session, Deadline) -> Result<SegmentDescription> {
    if (++asked == 1) server.set(recordOf(3));
    if (session == recordOf(3).session) return descriptionOf(3, kName);
    return Error{ErrorCode::kPeerLost, "connection refused"};
  };
  NameKeeper keeper(server, ask, optionsOf(1));
  EXPECT_EQ(keeper.publish().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(server.session(), recordOf(3).session);
  EXPECT_EQ(asked, 2);
}

}  // namespace
}  // namespace mooncake::transfer
