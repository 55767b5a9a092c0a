#include "wires/local/shared_work.h"

#include <chrono>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <thread>
#include <vector>

namespace mooncake {
namespace {

TEST(SharedWork, EachPieceIsDoneOnceAndAllAreDoneAtTheEnd) {
  std::vector<std::thread> helpers;
  for (int round = 0; round < 2000; ++round) {
    std::vector<int> done(round % 17, 0);  // destroyed when finish() has returned
    const auto work = std::make_shared<SharedWork>(done.size(), [&](size_t i) { ++done[i]; });
    helpers.emplace_back([work] { work->help(); });
    work->finish();
    EXPECT_EQ(done, std::vector<int>(done.size(), 1));
    if (helpers.size() == 8) {
      for (auto& helper : helpers) helper.join();
      helpers.clear();
    }
  }
  for (auto& helper : helpers) helper.join();
}

TEST(SharedWork, TheOwnerWaitsForAPieceThatAnotherIsInTheMiddleOf) {
  std::promise<void> begun, release;
  SharedWork work(1, [&](size_t) {
    begun.set_value();
    release.get_future().wait();
  });
  std::thread helper([&] { work.help(); });
  begun.get_future().wait();
  const auto finished = std::async(std::launch::async, [&] { work.finish(); });
  EXPECT_EQ(finished.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  release.set_value();
  EXPECT_EQ(finished.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  helper.join();
}

TEST(SharedWork, WhoHelpsTooLateTouchesNothing) {
  int pieces = 0;
  SharedWork work(3, [&](size_t) { ++pieces; });
  work.finish();
  work.help();
  EXPECT_EQ(pieces, 3);
}

}  // namespace
}  // namespace mooncake
