// Random programs of deaths and newcomers: processes end at any moment of their life, also while they
// are let in, and others take their ranks. In the end each rank is held by a living process, and all
// of them agree.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "engine_side.h"
#include "job_side.h"
#include "membership/membership.h"

namespace mooncake::testing {
namespace {

constexpr std::chrono::milliseconds kFailureTimeout(3'000);

// Where newcomers find members of the job.
class Directory {
 public:
  void set(int rank, Bytes endpoint) {
    std::lock_guard lock(mutex_);
    endpoints_[rank] = std::move(endpoint);
  }
  void remove(int rank) {
    std::lock_guard lock(mutex_);
    endpoints_.erase(rank);
  }
  std::vector<Bytes> read(unsigned seed) const {
    std::lock_guard lock(mutex_);
    std::vector<Bytes> found;
    for (const auto& [rank, endpoint] : endpoints_) found.push_back(endpoint);
    std::ranges::shuffle(found, std::mt19937(seed));
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, Bytes> endpoints_;
};

// A process: an engine after the other until it is let in.
class Process {
 public:
  Process(std::string wire, int rank, int size, Directory& directory, unsigned seed)
      : wire_(std::move(wire)),
        directory_(directory),
        seed_(seed),
        options_{.identity = kJob, .rank = rank, .size = size, .failureTimeout = kFailureTimeout} {
    auto stop = StopSignal::make();
    EXPECT_TRUE(stop.ok());
    stop_ = std::move(*stop);
    thread_ = std::thread([this] { run(); });
  }
  // A founding member.
  Process(std::shared_ptr<Engine> engine, std::shared_ptr<Membership> membership,
          Directory& directory)
      : directory_(directory), engine_(std::move(engine)), membership_(std::move(membership)) {
    options_.rank = membership_->rank();
    directory_.set(options_.rank, engine_->endpoint());
    isIn_ = true;
  }

  ~Process() {
    if (thread_.joinable()) thread_.join();
  }

  // As good as an exit: the process says so itself.
  void kill() {
    isDead_ = true;
    directory_.remove(options_.rank);
    if (stop_) stop_->stop();
    std::shared_ptr<Engine> engine;
    {
      std::lock_guard lock(mutex_);
      engine = engine_;
    }
    if (engine) engine->leave({Farewell::How::kFailed, "killed by the test"});
    if (thread_.joinable()) thread_.join();
    std::lock_guard lock(mutex_);
    membership_.reset();
    engine_.reset();
  }
  bool isIn() const { return isIn_ && !isDead_; }
  // Ends when the process is in, or has failed.
  void await() {
    if (thread_.joinable()) thread_.join();
  }
  std::shared_ptr<Engine> engine() const {
    std::lock_guard lock(mutex_);
    return engine_;
  }
  const std::shared_ptr<Membership>& membership() const { return membership_; }
  const std::string& lastError() const { return lastError_; }

 private:
  void run() {
    const Deadline deadline = Deadline::after(kPatience);
    while (!isDead_ && !deadline.passed()) {
      const auto engine =
          makeJobEngine(wire_, "newcomer " + std::to_string(options_.rank), kFailureTimeout);
      {
        std::lock_guard lock(mutex_);
        engine_ = engine;
      }
      if (isDead_) return engine->leave({Farewell::How::kFailed, "killed by the test"});
      options_.members = directory_.read(seed_++);
      auto joined = Membership::join(engine, options_, deadline, stop_.get());
      if (!joined.ok()) {
        lastError_ = joined.error().message;
        continue;
      }
      membership_ = *joined;
      if (!isDead_) directory_.set(options_.rank, engine->endpoint());
      isIn_ = true;
      return;
    }
  }

  const std::string wire_;
  Directory& directory_;
  unsigned seed_ = 0;  // of the order in which it asks members
  JoinOptions options_;
  std::unique_ptr<StopSignal> stop_;
  mutable std::mutex mutex_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Membership> membership_;
  std::string lastError_;
  std::atomic<bool> isDead_{false};
  std::atomic<bool> isIn_{false};
  std::thread thread_;
};

class Storm {
 public:
  Storm(std::string wire, unsigned seed) : wire_(std::move(wire)), random_(seed) {}

  void run() {
    begin(3 + draw(4));
    for (int left = 4 + draw(12); left > 0; --left) {
      step();
      if (draw(3) > 0) std::this_thread::sleep_for(std::chrono::microseconds(draw(3'000)));
    }
    end();
  }

 private:
  int draw(int below) { return std::uniform_int_distribution<int>(0, below - 1)(random_); }
  int size() const { return static_cast<int>(ranks_.size()); }

  void begin(int size) {
    std::vector<std::shared_ptr<Engine>> engines;
    std::vector<Bytes> endpoints;
    for (int rank = 0; rank < size; ++rank) {
      engines.push_back(makeJobEngine(wire_, "rank " + std::to_string(rank), kFailureTimeout));
      endpoints.push_back(engines.back()->endpoint());
    }
    ranks_.resize(size_t(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto& engine = engines[size_t(rank)];
        auto peers = engine->connect(endpoints, Deadline::after(kPatience));
        ASSERT_TRUE(peers.ok()) << peers.error().message;
        auto started = Membership::start(
            engine,
            {.rank = rank, .peers = *peers, .failureTimeout = kFailureTimeout, .identity = kJob});
        ASSERT_TRUE(started.ok()) << started.error().message;
        ranks_[size_t(rank)] = std::make_unique<Process>(engine, *started, directory_);
      });
    }
    for (auto& thread : threads) thread.join();
  }

  std::vector<int> ranksThatAreIn() const {
    std::vector<int> found;
    for (int rank = 0; rank < size(); ++rank) {
      if (ranks_[size_t(rank)] && ranks_[size_t(rank)]->isIn()) found.push_back(rank);
    }
    return found;
  }

  // Some rank of the job lives at any time.
  void step() {
    const auto in = ranksThatAreIn();
    const int rank = draw(size());
    auto& process = ranks_[size_t(rank)];
    if (!process) return start(rank);
    if (process->isIn() && in.size() < 2) return;
    process->kill();
    process.reset();
    if (draw(2) == 0) start(rank);
  }

  void start(int rank) {
    ranks_[size_t(rank)] =
        std::make_unique<Process>(wire_, rank, size(), directory_, unsigned(draw(1'000'000)));
  }

  void end() {
    for (int rank = 0; rank < size(); ++rank) {
      if (!ranks_[size_t(rank)]) start(rank);
    }
    for (auto& process : ranks_) process->await();
    for (int rank = 0; rank < size(); ++rank) {
      const Process& process = *ranks_[size_t(rank)];
      ASSERT_TRUE(process.isIn()) << "rank " << rank << ": " << process.lastError();
      const Membership& membership = *process.membership();
      ASSERT_TRUE(eventually([&] {
        return membership.view().active == JobRanks::firstRanks(size());
      })) << "rank "
          << rank << " is in epoch " << membership.view().epoch << " with "
          << membership.view().active.count() << " ranks";
    }
    const View view = ranks_[0]->membership()->view();
    for (int rank = 0; rank < size(); ++rank) {
      const Membership& membership = *ranks_[size_t(rank)]->membership();
      ASSERT_TRUE(membership.standing().ok()) << membership.standing().error().message;
      EXPECT_EQ(membership.view(), view);
      for (int other = 0; other < size(); ++other) {
        const auto roster = membership.roster();
        EXPECT_EQ(roster->term.holders[size_t(other)]->id, ranks_[size_t(other)]->engine()->id());
        if (other == rank) continue;
        ASSERT_TRUE(eventually([&] {
          const auto there = membership.peer(other);
          return there && !there->disconnected;
        })) << "rank "
            << rank << " has no connection to rank " << other;
      }
    }
  }

  const std::string wire_;
  std::mt19937 random_;
  Directory directory_;
  std::vector<std::unique_ptr<Process>> ranks_;  // null: dead
};

class JoinStorm : public ::testing::TestWithParam<const char*> {};

TEST_P(JoinStorm, AllRanksAreHeldInTheEnd) {
  const char* given = std::getenv("MOONCAKE_TEST_SCHEDULES");
  const unsigned seeds = given ? unsigned(std::atoi(given)) : 12;
  const char* first = std::getenv("MOONCAKE_TEST_SEED");
  for (unsigned i = 0; i < seeds && !HasFailure(); ++i) {
    const unsigned seed = (first ? unsigned(std::atoi(first)) : 1) + i;
    SCOPED_TRACE("MOONCAKE_TEST_SEED=" + std::to_string(seed));
    Storm(GetParam(), seed).run();
  }
}

INSTANTIATE_TEST_SUITE_P(Wires, JoinStorm, ::testing::Values("inproc", "shm", "tcp"),
                         [](const auto& wire) { return std::string(wire.param); });

}  // namespace
}  // namespace mooncake::testing
