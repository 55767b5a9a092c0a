// A group of the largest supported size (TESTED_RANKS in mooncake_backend/options.py), with ranks
// as threads.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <vector>

#include "collectives/collectives.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

constexpr int kRanks = 64;

// Fewer ranks over tcp: each pair has three connections, all in one process.
struct Size {
  const char* transport;
  int ranks;
};

class LargeGroup : public testing::TestWithParam<Size> {};

// Whether the process may open two descriptors for each pair of ranks.
bool hasDescriptors(rlim_t wanted) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= wanted;
}

TEST_P(LargeGroup, ComputesAndGoesOnWithoutARank) {
  if (!hasDescriptors(6000)) GTEST_SKIP() << "needs 6000 descriptors in one process";
  const auto [transport, size] = GetParam();
#ifdef __SANITIZE_THREAD__
  if (size == kRanks) GTEST_SKIP() << "ThreadSanitizer leaves no room for 4 TiB of mappings";
#endif
  runRanks({.size = size, .transports = {transport}, .failureTimeout = std::chrono::seconds(30)},
           [](Group& group) {
             const int size = group.size();
             const auto sum = [&](int each) {
               std::vector<float> data(100, float(each));
               const Status status = allreduce(group, std::as_writable_bytes(std::span(data)),
                                               {DType::kFloat32, ReduceKind::kSum}, soon());
               EXPECT_TRUE(status.ok()) << status.error().message;
               return data.back();
             };
             EXPECT_EQ(sum(group.rank()), float(size * (size - 1) / 2));
             if (group.rank() == size - 1) return;  // its engine says goodbye
             EXPECT_EQ(sum(1), float(size - 1));
             EXPECT_EQ(group.lastView->active.size(), size_t(size - 1));
           });
}

INSTANTIATE_TEST_SUITE_P(Wires, LargeGroup, testing::Values(Size{"shm", kRanks}, Size{"tcp", 16}));

}  // namespace
}  // namespace mooncake::test
