#include <gtest/gtest.h>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <thread>

#include "wires/nic/registrations.h"

namespace mooncake::testing {
namespace {

// A card that only registers memory, up to a limit that it does not tell.
class RegisteringNic final : public Nic {
 public:
  RegisteringNic(uint64_t told, uint64_t device) : device_(device) {
    limits_.mostMemoryBytes = told;
  }

  Result<std::unique_ptr<NicMemory>> registerMemory(std::span<std::byte> memory,
                                                    uint32_t) override {
    std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    if (memory.size() > device_) return Error{ErrorCode::kExhausted, "too much"};
    ++open;
    return std::unique_ptr<NicMemory>(std::make_unique<Memory>(*this, memory));
  }
  const std::string& name() const override { return name_; }
  const char* provider() const override { return "registering"; }
  const NicLimits& limits() const override { return limits_; }
  Bytes address() const override { return {}; }
  Result<NicPeer> insert(ByteView) override { return unsupported(); }
  void remove(NicPeer) override {}
  Status send(NicPeer, NicBuffer, NicBuffer, void*) override { return unsupported(); }
  Status receive(NicBuffer, void*) override { return unsupported(); }
  Status read(NicPeer, NicBuffer, NicKey, uint64_t, void*) override { return unsupported(); }
  Status write(NicPeer, NicBuffer, NicKey, uint64_t, void*) override { return unsupported(); }
  size_t poll(std::span<NicCompletion>) override { return 0; }
  void wait(Deadline) override {}
  void wake() override {}
  void close() override {}

  std::mutex mutex;
  size_t open = 0;
  std::set<std::thread::id> threads;

 private:
  struct Memory final : NicMemory {
    Memory(RegisteringNic& of, std::span<std::byte> which) : nic(of), bytes(which) {}
    ~Memory() override {
      std::lock_guard lock(nic.mutex);
      --nic.open;
    }
    std::span<std::byte> memory() const override { return bytes; }
    NicKey key() const override { return {}; }
    RegisteringNic& nic;
    std::span<std::byte> bytes;
  };
  static Error unsupported() { return {ErrorCode::kUnsupported, ""}; }

  const uint64_t device_;
  const std::string name_ = "registering";
  NicLimits limits_;
};

constexpr uint64_t kMiB = 1 << 20;

// Addresses without memory behind them, which no code reads.
struct Reserved {
  explicit Reserved(size_t bytes)
      : all(static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_NONE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
            bytes) {}
  ~Reserved() { ::munmap(all.data(), all.size()); }
  std::span<std::byte> all;
};

TEST(NicRegistrations, AreSplitAtTheLimitWithoutGaps) {
  RegisteringNic card(10 * kMiB + 5, UINT64_MAX);
  NicRegistrations registrations({&card});
  const Reserved memory(35 * kMiB + 3);
  const auto made = registrations.add(memory.all, 0);
  ASSERT_TRUE(made.ok());
  ASSERT_EQ((*made)->pieces(0).size(), 4u);
  uint64_t offset = 0;
  for (const auto& piece : (*made)->pieces(0)) {
    EXPECT_EQ(piece.offset, offset);
    EXPECT_EQ(piece.memory->memory().data(), memory.all.data() + offset);
    EXPECT_LE(piece.memory->memory().size(), 10 * kMiB + 5);
    EXPECT_EQ(&(*made)->pieceAt(0, offset), &piece);
    offset += piece.memory->memory().size();
    EXPECT_EQ(&(*made)->pieceAt(0, offset - 1), &piece);
  }
  EXPECT_EQ(offset, memory.all.size());
}

TEST(NicRegistrations, ADeviceThatTakesLessIsGivenLess) {
  RegisteringNic small(1 << 30, 300 * kMiB), large(0, UINT64_MAX);
  NicRegistrations registrations({&small, &large});
  const Reserved memory(1000 * kMiB);
  const auto made = registrations.add(memory.all, 0);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ((*made)->pieces(0).size(), 4u);
  EXPECT_EQ((*made)->pieces(1).size(), 1u);
  EXPECT_EQ(registrations.counters().halvings, 2u);
}

TEST(NicRegistrations, OnAllCardsOrOnNone) {
  RegisteringNic good(0, UINT64_MAX), bad(0, 1);
  NicRegistrations registrations({&good, &bad});
  const Reserved memory(8 * kMiB);
  const auto made = registrations.add(memory.all, 0);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().message, "network card registering: too much");
  EXPECT_EQ(good.open, 0u);
  EXPECT_EQ(registrations.counters().made, 0u);
}

TEST(NicRegistrations, TheSameMemoryIsRegisteredOnceWhileItIsHeld) {
  RegisteringNic card(0, UINT64_MAX);
  NicRegistrations registrations({&card});
  const Reserved memory(4 * kMiB);
  {
    const auto first = registrations.add(memory.all, 0), again = registrations.add(memory.all, 0);
    ASSERT_TRUE(first.ok() && again.ok());
    EXPECT_EQ(first->get(), again->get());
    const auto other = registrations.add(memory.all, 1),
               part = registrations.add(memory.all.first(9), 0);
    ASSERT_TRUE(other.ok() && part.ok());
    EXPECT_NE(first->get(), other->get());
    EXPECT_EQ(card.open, 3u);
  }
  EXPECT_EQ(card.open, 0u);
  EXPECT_TRUE(registrations.add(memory.all, 0).ok());
  EXPECT_EQ(registrations.counters().made, 4u);
  EXPECT_EQ(registrations.counters().shared, 1u);
}

TEST(NicRegistrations, CardsRegisterSideBySide) {
  RegisteringNic one(0, UINT64_MAX), two(0, UINT64_MAX);
  NicRegistrations registrations({&one, &two});
  const Reserved memory(64 * kMiB);
  ASSERT_TRUE(registrations.add(memory.all, 0).ok());
  EXPECT_NE(*one.threads.begin(), *two.threads.begin());
}

}  // namespace
}  // namespace mooncake::testing
