#include "engine/rendezvous/generation.h"

#include <gtest/gtest.h>
#include <thread>

#include "engine/rendezvous/address_book.h"
#include "ranks_in_threads.h"

namespace mooncake {
namespace {

using test::MemoryStore;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }
Deadline atOnce() { return Deadline::after(std::chrono::milliseconds(30)); }

Bytes bytesOf(const std::string& text) {
  const ByteView view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

std::unique_ptr<Generation> join(Store& store, int rank) {
  auto generation = Generation::join(store, rank, std::nullopt, soon());
  EXPECT_TRUE(generation.ok());
  return std::move(*generation);
}

// Begins a job on one rank. Begins again if the rank had joined an earlier attempt.
std::vector<Bytes> begin(Store& store, int rank, int size, const std::string& mine) {
  for (;;) {
    const auto generation = join(store, rank);
    auto all = exchange(*generation, "members", rank, size, bytesOf(mine), soon());
    if (all.ok()) return *all;
    EXPECT_EQ(all.error().code, ErrorCode::kInterrupted) << all.error().message;
    const Status next = generation->awaitSuccessor(soon());
    EXPECT_TRUE(next.ok());
    if (!next.ok()) return {};
  }
}

// Ranks that come before rank 0 find the entries that the attempt before it left.
void expectBegins(Store& store, int size, const std::string& attempt) {
  std::vector<std::thread> threads;
  std::vector<std::vector<Bytes>> found(static_cast<size_t>(size));
  const auto start = [&](int rank) {
    threads.emplace_back([&, rank] {
      found[size_t(rank)] = begin(store, rank, size, attempt + std::to_string(rank));
    });
  };
  for (int rank = size - 1; rank >= 0; --rank) start(rank);
  for (auto& thread : threads) thread.join();
  std::vector<Bytes> expected;
  for (int rank = 0; rank < size; ++rank)
    expected.push_back(bytesOf(attempt + std::to_string(rank)));
  for (const auto& all : found) EXPECT_EQ(all, expected);
}

TEST(Generation, BeginsAgainAfterOneThatBegan) {
  MemoryStore store;
  for (const char* attempt : {"a", "b", "c"}) expectBegins(store, 3, attempt);
}

TEST(Generation, BeginsAgainAfterOneThatWasKilledHalfWay) {
  for (const int absent : {0, 1, 2}) {
    MemoryStore store;
    expectBegins(store, 3, "first");
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == absent) continue;
      const auto generation = join(store, rank);
      (void)exchange(*generation, "members", rank, 3, bytesOf("killed"), atOnce());
    }
    expectBegins(store, 3, "again");
  }
}

TEST(Generation, EveryAttemptHasAKeyOfItsOwn) {
  MemoryStore store;
  const auto first = join(store, 0), found = join(store, 1);
  EXPECT_EQ(first->jobKey(), found->jobKey());
  const auto second = join(store, 0);
  EXPECT_NE(first->jobKey(), second->jobKey());
  EXPECT_TRUE(found->hasSuccessor());
  EXPECT_FALSE(join(store, 1)->hasSuccessor());
}

TEST(Generation, SaysWhatTheStoreHolds) {
  MemoryStore store;
  expectBegins(store, 2, "first");
  const auto generation = join(store, 1);
  const auto all = exchange(*generation, "members", 1, 2, bytesOf("again"), soon());
  ASSERT_FALSE(all.ok());
  EXPECT_EQ(all.error().code, ErrorCode::kInterrupted);
  const Status next = generation->awaitSuccessor(atOnce());
  EXPECT_EQ(next.code(), ErrorCode::kTimeout);
  EXPECT_NE(next.error().message.find("an earlier attempt"), std::string::npos);
}

TEST(Generation, WhoNeverComesIsNamed) {
  MemoryStore store;
  const auto generation = join(store, 0);
  const auto all = exchange(*generation, "members", 0, 3, bytesOf("here"), atOnce());
  ASSERT_FALSE(all.ok());
  EXPECT_NE(all.error().message.find("ranks 1, 2 of 3"), std::string::npos);
}

class CountingStore final : public MemoryStore {
 public:
  Status set(const std::string& key, ByteView value) override {
    ++requests;
    return MemoryStore::set(key, value);
  }
  Status append(const std::string& key, ByteView value) override {
    ++requests;
    return MemoryStore::append(key, value);
  }
  Result<std::vector<Bytes>> get(const std::vector<std::string>& keys, Deadline deadline) override {
    ++requests;
    return MemoryStore::get(keys, deadline);
  }
  Result<bool> present(const std::string& key) override {
    ++requests;
    return MemoryStore::present(key);
  }

  int requests = 0;
};

TEST(Generation, TheMissingRanksAreNamedByOneRequest) {
  constexpr int kSize = 512;
  CountingStore store;
  for (const int come : {7, 8, 9, 0}) {
    store.requests = 0;
    const auto all = exchange(store, "members", come, kSize, bytesOf("here"), atOnce());
    ASSERT_FALSE(all.ok());
    // It sets its key, appends its rank, awaits the keys, and asks for the ranks that have come.
    EXPECT_EQ(store.requests, 4);
    const std::string missing = come == 7 ? "ranks 0-6, 8-511" : "ranks 0-6, ";
    const std::string& text = all.error().message;
    EXPECT_TRUE(text.starts_with(come == 0 ? "ranks 1-6, 10-511 of 512 did not come" : missing))
        << text;
  }
}

TEST(Generation, AKeyOnRankZeroAloneIsRefused) {
  MemoryStore store;
  ASSERT_TRUE(Generation::join(store, 0, "a key of sixteen", soon()).ok());
  const auto none = Generation::join(store, 1, std::nullopt, soon());
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.error().message.find("MOONCAKE_JOB_KEY"), std::string::npos);
  const auto same = Generation::join(store, 1, "a key of sixteen", soon());
  ASSERT_TRUE(same.ok());
  EXPECT_EQ((*same)->jobKey(), bytesOf("a key of sixteen"));
}

TEST(Generation, WhatDoesNotDecodeIsRefused) {
  MemoryStore store;
  const auto announced = [&] {
    auto found = store.get({"mooncake/generation"}, soon());
    return found.ok() ? found->front() : Bytes();
  };
  (void)join(store, 0);
  const Bytes whole = announced();
  for (size_t length = 0; length < whole.size(); ++length) {
    ASSERT_TRUE(store.set("mooncake/generation", ByteView(whole).first(length)).ok());
    EXPECT_FALSE(Generation::join(store, 1, std::nullopt, soon()).ok());
  }
}

}  // namespace
}  // namespace mooncake
