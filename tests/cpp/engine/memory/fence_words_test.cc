#include "engine/memory/fence_words.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace mooncake {
namespace {

class FenceWordsTest : public ::testing::Test {
 protected:
  FenceWordsTest() { words_ = std::move(*FenceWords::create(*arena_)); }
  std::shared_ptr<FenceWords::Word> take(pid_t process = ::getpid()) {
    auto word = words_->take(process);
    return word.ok() ? *word : nullptr;
  }
  // Takes all words that are left.
  std::vector<std::shared_ptr<FenceWords::Word>> takeAll() {
    std::vector<std::shared_ptr<FenceWords::Word>> all;
    while (auto word = take()) all.push_back(std::move(word));
    return all;
  }
  // The word at the peer's address.
  std::atomic<uint32_t>& at(const FenceWords::Word& word) const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(arena_->base() + word.offset());
  }

  const std::unique_ptr<Arena> arena_ = std::move(*Arena::create(1 << 20));
  std::shared_ptr<FenceWords> words_;
};

TEST_F(FenceWordsTest, APeerThatWasHungUpOnKeepsItsWordUntilItLeaves) {
  auto word = take();
  const auto others = takeAll();
  EXPECT_EQ(others.size(), FenceWords::kMost - 1);
  auto& seen = at(*word);
  word->close();
  seen.fetch_add(FenceWords::kWrite);
  EXPECT_TRUE(word->hasLateWrites());
  word = nullptr;
  EXPECT_EQ(take(), nullptr);
  seen.fetch_sub(FenceWords::kWrite);
  EXPECT_EQ(take(), nullptr);
  seen.fetch_or(FenceWords::kLeft);
  word = take();
  ASSERT_NE(word, nullptr);
  EXPECT_EQ(&at(*word), &seen);
  EXPECT_EQ(seen, 0u);
}

TEST_F(FenceWordsTest, AWordThatWasGivenBackIsLeftAlone) {
  auto word = take();
  at(*word).fetch_or(FenceWords::kLeft);
  EXPECT_FALSE(word->hasLateWrites());
  word->release();
  const auto other = take();
  ASSERT_EQ(other->offset(), word->offset());
  word->fence();
  word->close();
  EXPECT_EQ(at(*other), 0u);
  other->close();
  at(*other).fetch_add(FenceWords::kWrite);
  EXPECT_FALSE(word->hasLateWrites());
  word = nullptr;
  EXPECT_TRUE(other->hasLateWrites());
  EXPECT_NE(take()->offset(), other->offset());
}

// A peer that is slow to take an offer says kLeft after we have given up the connection.
TEST_F(FenceWordsTest, AnOfferedWordWaitsForItsPeer) {
  auto slow = take();
  (void)slow->offer();
  const uint64_t place = slow->offset();
  std::atomic<uint32_t>& seen = at(*slow);
  slow.reset();
  {
    const auto others = takeAll();
    EXPECT_EQ(others.size(), FenceWords::kMost - 1);
    for (const auto& one : others) ASSERT_NE(one->offset(), place);
    seen.fetch_or(FenceWords::kLeft);
    const auto next = take();
    ASSERT_NE(next, nullptr);
    EXPECT_EQ(next->offset(), place);
  }
}

TEST_F(FenceWordsTest, TheEndOfAProcessFreesItsWords) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  auto word = take(child);
  const auto others = takeAll();
  const uint64_t offset = word->offset();
  word->fence();
  word = nullptr;
  EXPECT_EQ(take(), nullptr);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  word = take();
  ASSERT_NE(word, nullptr);
  EXPECT_EQ(word->offset(), offset);
}

}  // namespace
}  // namespace mooncake
