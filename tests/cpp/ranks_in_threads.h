#pragma once

#include <condition_variable>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/mailbox.h"
#include "engine/engine.h"
#include "engine/rendezvous/store.h"
#include "group/group.h"
#include "loopback_cards.h"

namespace mooncake::test {

// A store for ranks that are threads of one process.
class MemoryStore : public Store {
 public:
  Status set(const std::string& key, ByteView value) override {
    std::lock_guard lock(mutex_);
    values_[key] = Bytes(value.begin(), value.end());
    changed_.notify_all();
    return {};
  }
  Status append(const std::string& key, ByteView value) override {
    std::lock_guard lock(mutex_);
    values_[key].insert(values_[key].end(), value.begin(), value.end());
    changed_.notify_all();
    return {};
  }
  Result<std::vector<Bytes>> get(const std::vector<std::string>& keys, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    std::vector<Bytes> found;
    for (const auto& key : keys) {
      if (!changed_.wait_until(lock, deadline.when(), [&] { return values_.count(key) != 0; })) {
        return Error{ErrorCode::kTimeout, "no key " + key};
      }
      found.push_back(values_[key]);
    }
    return found;
  }
  Result<bool> present(const std::string& key) override {
    std::lock_guard lock(mutex_);
    return values_.count(key) != 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Bytes> values_;
};

struct Ranks {
  int size = 2;
  std::vector<std::string> transports;
  bool crossMemoryAttach = true;
  size_t eagerBytes = 0;
  std::chrono::seconds init{60};
  std::chrono::milliseconds failureTimeout{3000};
  uint64_t simSeed = 1;
};

inline EngineEnv envOf(const Ranks& ranks) {
  EngineEnv env;
  env.transports = ranks.transports;
  env.crossMemoryAttach = ranks.crossMemoryAttach;
  env.failureTimeout = ranks.failureTimeout;
  env.simSeed = ranks.simSeed;
  return env;
}

// Runs `body` once for each rank, each on a thread with an engine and a group of its own.
inline void runRanks(const Ranks& ranks, const std::function<void(Group&)>& body) {
  const LoopbackCards cards(ranks.transports);
  MemoryStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks.size; ++rank) {
    threads.emplace_back([&, rank] {
      const Deadline deadline = Deadline::after(ranks.init);
      EngineOptions options{.env = envOf(ranks),
                            .logName = "rank " + std::to_string(rank),
                            .arenaBytes = size_t(1) << 30};
      options.jobKey = Bytes(32, std::byte{7});
      auto engine = Engine::create(std::move(options));
      ASSERT_TRUE(engine.ok()) << engine.error().message;
      auto group = Group::create(*engine, store,
                                 {.name = "test",
                                  .rank = rank,
                                  .size = ranks.size,
                                  .env = {.eagerBytes = ranks.eagerBytes},
                                  .mailboxBytes = kMailboxBytes},
                                 deadline);
      ASSERT_TRUE(group.ok()) << group.error().message;
      body(**group);
      (*group)->leave(Deadline::after(std::chrono::seconds(30)));
    });
  }
  for (auto& thread : threads) thread.join();
}

inline Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

}  // namespace mooncake::test
