// The example of docs/extending.md, "Add a collective": the page shows what stands between the
// two marks (tests/test_docs.py compares them).
#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <numeric>
#include <span>
#include <vector>

#include "group/group.h"
#include "group/operation.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

constexpr Verb kExscan{200};  // no real verb's number

// ---- in docs/extending.md
// Eager: one exchange of slots, s bytes to each of the n-1 others. Every rank adds what those
// before it gave, so no rank waits for another one's sum.
class Exscan final : public Algorithm {
 public:
  Exscan(std::span<const int64_t> input, std::span<int64_t> output)
      : input_(input), output_(output) {}

  Status publish(Operation& op) override {
    std::memcpy(op.payload(), input_.data(), input_.size_bytes());
    return op.begin(input_.size_bytes());  // from here on the others can read it
  }

  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());  // all have published, and all called the same
    std::ranges::fill(output_, 0);
    for (const int r : op.ranks()) {  // without those that are lost, in rank order
      if (r >= op.rank()) break;
      const auto payload = op.payloadOf(r, input_.size_bytes());
      if (!payload.ok()) return payload.error();
      for (size_t i = 0; i < output_.size(); ++i) {
        int64_t value;
        std::memcpy(&value, *payload + i * sizeof value, sizeof value);
        output_[i] += value;
      }
    }
    return op.commit();  // our slot has all that others need
  }

 private:
  const std::span<const int64_t> input_;
  const std::span<int64_t> output_;
};

Status exscan(Group& group, std::span<const int64_t> input, std::span<int64_t> output,
              Deadline deadline) {
  Exscan algorithm(input, output);
  const Call call{.verb = kExscan, .dtype = DType::kInt64, .count = input.size()};
  return Operation(group, call, deadline).run(algorithm);
}
// ---- end

constexpr std::chrono::seconds kLong{60};

TEST(AddCollectiveTest, TheExampleOfTheDocumentsWorks) {
  runRanks({.size = 3}, [](Group& group) {
    for (const size_t count : {1, 100}) {
      std::vector<int64_t> input(count), output(count, -1);
      std::iota(input.begin(), input.end(), group.rank() + 1);
      const Status status = exscan(group, input, output, Deadline::after(kLong));
      ASSERT_TRUE(status.ok()) << status.error().message;
      for (size_t i = 0; i < count; ++i) {
        int64_t expected = 0;
        for (int r = 0; r < group.rank(); ++r) expected += int64_t(i) + r + 1;
        EXPECT_EQ(output[i], expected);
      }
    }
  });
}

TEST(AddCollectiveTest, RanksThatCallItWithOtherLengthsAreToldSo) {
  runRanks({.size = 2}, [](Group& group) {
    std::vector<int64_t> input(size_t(group.rank()) + 1), output(input.size());
    const Status status = exscan(group, input, output, Deadline::after(kLong));
    EXPECT_EQ(status.code(), ErrorCode::kMismatch);
  });
}

}  // namespace
}  // namespace mooncake::test
