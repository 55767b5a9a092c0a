// A dispatch gives up writes of cards while parts of them are on their way. A later operation uses
// their target memory, and must not find the late parts there.
#include <barrier>
#include <bit>
#include <gtest/gtest.h>

#include "collectives/collectives.h"
#include "ep/calls.h"
#include "ranks_in_threads.h"
#include "wires/sim/sim_transport.h"

namespace mooncake::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSlowest{600};  // longest time that a part of a write takes
constexpr milliseconds kAway{300};     // time by which rank 1 is late
constexpr milliseconds kTimeout{150};
constexpr milliseconds kPatience{50};
constexpr size_t kTokens = 128, kHidden = 4096;
constexpr size_t kBytes = 32 << 20;
constexpr int kTopk = 2;

enum class GivenUpBy { kTimeout, kSkip };

uint16_t toBf16(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }

std::vector<uint16_t> rowsOf(int rank) {
  std::vector<uint16_t> rows(kTokens * kHidden);
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] = toBf16(float((i * 7 + size_t(rank) * 13) % 101));
  return rows;
}

// Every token of a rank goes to both experts of the other rank, which send it back unchanged.
class Expert {
 public:
  explicit Expert(Group& group) : group_(group) {
    auto block = group.reserve(kBytes);
    EXPECT_TRUE(block.ok());
    const ep::BufferLayout layout(kBytes);
    auto landing =
        group.engine().regions().add(block->data, 2 * layout.sendBytes(), kRemoteWrite | kLasting);
    EXPECT_TRUE(landing.ok());
    landing_ = std::move(*landing);
    auto hosts = ep::Hosts::meet(
        group, ep::Hosts::Memory{.sendBytes = layout.sendBytes(), .region = landing_.remote()},
        soon());
    EXPECT_TRUE(hosts.ok());
    memory_.reset(new ep::Memory{group, *block, layout, std::move(*hosts)});
  }

  std::shared_ptr<ep::Handle> makeHandle() const {
    const auto handle = std::make_shared<ep::Handle>();
    handle->shape = {2, 2 * kTopk, kTokens, kHidden};
    handle->experts = std::make_shared<const ep::ExpertMap>(2 * kTopk, 2);
    handle->tokens = kTokens;
    handle->topk = kTopk;
    for (size_t i = 0; i < kTokens * kTopk; ++i)
      handle->chosen.push_back((1 - group_.rank()) * kTopk + int(i % kTopk));
    return handle;
  }
  ErrorCode dispatch(const std::shared_ptr<ep::Handle>& handle, const std::vector<uint16_t>& x,
                     Deadline deadline = soon(),
                     std::optional<Clock::duration> patience = std::nullopt) {
    ep::DispatchCall call;
    call.x = x.data();
    call.mask = GroupRanks::firstRanks(2);
    call.deadline = deadline;
    call.patience = patience;
    call.handle = handle;
    rows_.resize(kTopk * 2 * kTokens * kHidden * 2);
    counts_.resize(kTopk);
    sources_.resize(kTopk * 2 * kTokens);
    ranges_.resize(kTopk * 2);
    call.rows = rows_.data();
    call.counts = counts_.data();
    call.sources = sources_.data();
    call.ranges = ranges_.data();
    ep::Ending ending;
    return ep::dispatch(*memory_, call, ending).code();
  }
  const std::vector<std::byte>& rows() const { return rows_; }
  std::vector<uint16_t> combine(const std::shared_ptr<ep::Handle>& handle,
                                const std::vector<std::byte>& rows) {
    const std::vector<float> weights(kTokens * kTopk, 1);
    std::vector<uint16_t> combined(kTokens * kHidden);
    const auto missing = std::make_unique<bool[]>(kTokens);
    ep::CombineCall call;
    call.x = rows.data();
    call.rowStride = 2 * kHidden;
    call.chosen = handle->chosen;
    call.weights = weights.data();
    call.mask = GroupRanks::firstRanks(2);
    call.deadline = soon();
    call.handle = handle;
    call.combined = combined.data();
    call.missing = missing.get();
    ep::Ending ending;
    const Status status = ep::combine(*memory_, call, ending);
    EXPECT_TRUE(status.ok()) << status.error().message;
    return combined;
  }

 private:
  Group& group_;
  MemoryRegion landing_;
  std::unique_ptr<ep::Memory> memory_;
  std::vector<std::byte> rows_;
  std::vector<int32_t> counts_, sources_;
  std::vector<int64_t> ranges_;
};

class GivenUpWrites : public ::testing::Test {
 protected:
  ~GivenUpWrites() override { defaultSimOptions() = {}; }

  // Rank 1 is late for a dispatch, so that rank 0 gives up the rows that its cards write there.
  // Rank 1 then puts its rows of a combine into that memory. Rank 0 fetches them after all
  // late parts have arrived.
  static void run(GivenUpBy by, bool withdrawalStops) {
    defaultSimOptions() = {.cards = 2,
                           .odds = {.failed = 0,
                                    .late = 0,
                                    .slowWrites = 1,
                                    .lost = 0,
                                    .storm = 0,
                                    .death = 0,
                                    .lateness = kSlowest},
                           .withdrawalStops = withdrawalStops,
                           .closeEndsReads = true,
                           .breakOdds = 0};
    std::barrier together(2);
    runRanks({.size = 2, .transports = {"sim"}}, [&](Group& group) {
      Expert expert(group);
      const bool isLate = group.rank() == 1;
      const auto x = rowsOf(group.rank());
      const auto handle = expert.makeHandle();
      EXPECT_EQ(expert.dispatch(handle, x), ErrorCode::kOk);
      const auto rows = expert.rows();
      for (int i = 0; i < 3; ++i)
        EXPECT_EQ(expert.dispatch(expert.makeHandle(), x), ErrorCode::kOk);
      EXPECT_GT(group.engine().counters().byCards.written, x.size());

      together.arrive_and_wait();
      if (isLate) std::this_thread::sleep_for(kAway);
      const std::vector<uint16_t> others(kTokens * kHidden, toBf16(1000));
      const ErrorCode end =
          by == GivenUpBy::kTimeout
              ? expert.dispatch(expert.makeHandle(), others, Deadline::after(kTimeout))
              : expert.dispatch(expert.makeHandle(), others, soon(), kPatience);
      EXPECT_EQ(end, by == GivenUpBy::kTimeout ? ErrorCode::kTimeout : ErrorCode::kOk);
      EXPECT_TRUE(barrier(group, soon()).ok());
      if (!isLate) std::this_thread::sleep_for(2 * kSlowest);
      const auto combined = expert.combine(handle, rows);
      size_t wrong = 0;
      for (size_t i = 0; i < x.size(); ++i)
        wrong += combined[i] != toBf16(2 * std::bit_cast<float>(uint32_t(x[i]) << 16));
      EXPECT_EQ(wrong, 0u) << "values of " << x.size() << " on rank " << group.rank();
    });
  }
};

TEST_F(GivenUpWrites, AfterATimeoutDoNotLandInACombine) {
  for (const bool stops : {true, false}) run(GivenUpBy::kTimeout, stops);
}

TEST_F(GivenUpWrites, AfterASkipDoNotLandInACombine) {
  for (const bool stops : {true, false}) run(GivenUpBy::kSkip, stops);
}

}  // namespace
}  // namespace mooncake::test
