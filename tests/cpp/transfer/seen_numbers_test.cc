#include "transfer/seen_numbers.h"

#include <cstring>
#include <gtest/gtest.h>

namespace mooncake::transfer {
namespace {

EngineId idOf(uint64_t number) {
  EngineId id{};
  std::memcpy(id.data(), &number, sizeof number);
  return id;
}

TEST(SeenNumbers, EachOfEachSenderCountsOnce) {
  SeenNumbers seen;
  for (const uint64_t number : {1, 2, 5, 3}) {
    EXPECT_TRUE(seen.isNew(idOf(1), number));
    EXPECT_TRUE(seen.isNew(idOf(2), number));
    EXPECT_FALSE(seen.isNew(idOf(1), number));
  }
}

TEST(SeenNumbers, SendersThatComeAndGoTakeNoMoreMemory) {
  SeenNumbers seen;
  constexpr uint64_t kStays = 0;
  EXPECT_TRUE(seen.isNew(idOf(kStays), 7));
  for (uint64_t sender = 1; sender <= 10 * SeenNumbers::kMostSenders; ++sender) {
    EXPECT_TRUE(seen.isNew(idOf(sender), 7));
    EXPECT_FALSE(seen.isNew(idOf(sender), 7));
    // A sender that keeps sending is not forgotten.
    if (sender % 1000 == 0) {
      EXPECT_FALSE(seen.isNew(idOf(kStays), 7));
    }
  }
  EXPECT_EQ(seen.senders(), SeenNumbers::kMostSenders);
}

}  // namespace
}  // namespace mooncake::transfer
