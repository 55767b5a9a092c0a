#include "device/peer_mappings.h"

#include <atomic>
#include <csignal>
#include <gtest/gtest.h>
#include <optional>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "base/unix_socket.h"
#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"
#include "forked_ranks.h"

namespace mooncake::testing {
namespace {

constexpr size_t kLimit = 1 << 20, kBytes = 64 << 10;

bool isMapped(std::span<std::byte> memory) {
  unsigned char isResident = 0;
  return ::mincore(memory.data(), 4096, &isResident) == 0;
}

// Two processes in one: rank 0 owns memory, rank 1 maps it.
class PeerMappingsTest : public ::testing::Test {
 protected:
  PeerMappings::Fetch fetch(const PeerAllocation& allocation) {
    return [this, allocation] {
      ++fetched;
      return owner.descriptorOf(allocation);
    };
  }
  PeerMappings::Mapped open(const PeerAllocation& allocation) {
    auto opened = mapper.open(allocation, fetch(allocation));
    EXPECT_TRUE(opened.ok()) << opened.error().message;
    return opened.ok() ? *opened : PeerMappings::Mapped();
  }
  PeerMappings::Mapped allocate(size_t bytes = kBytes, uint64_t epoch = 1) {
    return valueOf(owner.allocate(bytes, epoch));
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  PeerMemory& memory = *devices->peerMemory();
  PeerMappings owner{memory, {.device = 0, .owner = 0, .limit = kLimit}};
  PeerMappings mapper{memory, {.device = 1, .owner = 1, .limit = kLimit}};
  int fetched = 0;
};

TEST_F(PeerMappingsTest, AMappingShowsTheOwnersMemory) {
  const auto own = allocate(5000);
  EXPECT_EQ(own.allocation.bytes, 8192u);
  const auto there = open(own.allocation);
  EXPECT_NE(there.memory.data(), own.memory.data());
  own.memory[8191] = std::byte{17};
  EXPECT_EQ(there.memory[8191], std::byte{17});
  there.memory[0] = std::byte{18};
  EXPECT_EQ(own.memory[0], std::byte{18});
  const auto place = valueOf(devices->placeOf(there.memory.data()));
  EXPECT_EQ(place.kind, MemoryKind::kDevice);
  EXPECT_EQ(place.device, 1);
}

TEST_F(PeerMappingsTest, AnAllocationIsMappedOnceForAllItsUsers) {
  const auto own = allocate();
  const auto first = open(own.allocation), second = open(own.allocation);
  EXPECT_EQ(first.memory.data(), second.memory.data());
  EXPECT_EQ(fetched, 1);
  EXPECT_EQ(mapper.bytesOf(0), kBytes);
  EXPECT_OK(mapper.drained(5));
  EXPECT_OK(mapper.release(own.allocation, 1));
  EXPECT_TRUE(isMapped(first.memory));
  EXPECT_OK(mapper.release(own.allocation, 1));
  EXPECT_FALSE(isMapped(first.memory));
  EXPECT_EQ(mapper.release(own.allocation, 1).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(mapper.bytesOf(0), 0u);
}

TEST_F(PeerMappingsTest, AMappingStaysUntilTheLastEpochOfItsWorkIsDrained) {
  const auto own = allocate();
  const auto there = open(own.allocation);
  open(own.allocation);
  EXPECT_OK(mapper.release(own.allocation, 4));
  EXPECT_OK(mapper.release(own.allocation, 3));  // the earlier user's work is the later one
  EXPECT_OK(mapper.drained(3));
  EXPECT_TRUE(isMapped(there.memory));
  EXPECT_EQ(mapper.release(own.allocation, 4).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(mapper.drained(2));  // is known already
  EXPECT_TRUE(isMapped(there.memory));
  EXPECT_OK(mapper.drained(4));
  EXPECT_FALSE(isMapped(there.memory));
}

TEST_F(PeerMappingsTest, AnEpochThatIsDrainedStaysDrained) {
  const auto own = allocate();
  const auto there = open(own.allocation);
  EXPECT_OK(mapper.drained(5));
  EXPECT_OK(mapper.drained(2));
  EXPECT_OK(mapper.release(own.allocation, 4));
  EXPECT_FALSE(isMapped(there.memory));
}

TEST_F(PeerMappingsTest, AMappingThatIsUsedAgainIsNotDropped) {
  const auto own = allocate();
  const auto there = open(own.allocation);
  EXPECT_OK(mapper.release(own.allocation, 2));
  EXPECT_EQ(open(own.allocation).memory.data(), there.memory.data());
  EXPECT_EQ(fetched, 1);
  EXPECT_OK(mapper.drained(2));
  EXPECT_TRUE(isMapped(there.memory));
}

TEST_F(PeerMappingsTest, OwnMemoryStaysUntilItsEpochIsDrained) {
  const auto own = allocate();
  EXPECT_OK(owner.release(own.allocation, 1));
  own.memory[0] = std::byte{1};
  EXPECT_OK(owner.drained(1));
  EXPECT_FALSE(isMapped(own.memory));
  EXPECT_EQ(owner.descriptorOf(own.allocation).status().code(), ErrorCode::kInvalidArgument);
}

TEST_F(PeerMappingsTest, ARestartedOwnersMemoryIsNotTheOldOne) {
  const auto old = allocate();
  const auto oldThere = open(old.allocation);
  old.memory[0] = std::byte{11};
  PeerMappings restarted(memory, {.device = 0, .owner = 0, .limit = kLimit});
  const auto fresh = valueOf(restarted.allocate(kBytes, 2));
  fresh.memory[0] = std::byte{22};
  EXPECT_EQ(fresh.allocation.number, old.allocation.number);
  const auto there = valueOf(
      mapper.open(fresh.allocation, [&] { return restarted.descriptorOf(fresh.allocation); }));
  EXPECT_EQ(there.memory[0], std::byte{22});
  EXPECT_EQ(oldThere.memory[0], std::byte{11});
  EXPECT_OK(mapper.release(old.allocation, 1));
  EXPECT_OK(mapper.drained(1));
  EXPECT_FALSE(isMapped(oldThere.memory));
  EXPECT_EQ(there.memory[0], std::byte{22});
}

TEST_F(PeerMappingsTest, ManyRestartsLeaveNoMappingBehind) {
  for (uint64_t epoch = 1; epoch <= 300; ++epoch) {
    PeerMappings restarted(memory, {.device = 0, .owner = 0, .limit = kLimit});
    const auto fresh = valueOf(restarted.allocate(kBytes, epoch));
    fresh.memory[0] = static_cast<std::byte>(epoch % 251);
    const auto there = valueOf(
        mapper.open(fresh.allocation, [&] { return restarted.descriptorOf(fresh.allocation); }));
    EXPECT_EQ(there.memory[0], static_cast<std::byte>(epoch % 251));
    EXPECT_OK(mapper.release(fresh.allocation, epoch));
    EXPECT_OK(mapper.drained(epoch - 1));
    EXPECT_EQ(mapper.bytesOf(0), kBytes);
  }
}

TEST_F(PeerMappingsTest, MoreThanTheLimitNamesTheVariable) {
  const auto refused = owner.allocate(kLimit + 1, 1);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kExhausted);
  const auto own = allocate(kLimit - kBytes);
  EXPECT_OK(owner.release(own.allocation, 1));  // is still there until the epoch is drained
  const auto second = owner.allocate(2 * kBytes, 2);
  ASSERT_FALSE(second.ok());
  for (const std::string& part : {std::string("MOONCAKE_PEER_MEMORY=1048576"),
                                  std::to_string(kLimit - kBytes) + " wait for work"})
    EXPECT_NE(second.error().message.find(part), std::string::npos) << second.error().message;
  EXPECT_OK(owner.drained(1));
  EXPECT_TRUE(owner.allocate(2 * kBytes, 2).ok());
}

TEST_F(PeerMappingsTest, EachOwnerHasALimitOfItsOwn) {
  PeerMappings other(memory, {.device = 0, .owner = 2, .limit = kLimit});
  open(allocate(kLimit).allocation);
  const auto theirs = valueOf(other.allocate(kBytes, 1)).allocation;
  EXPECT_TRUE(mapper.open(theirs, [&] { return other.descriptorOf(theirs); }).ok());
  const PeerAllocation more{.owner = 0, .epoch = 1, .number = 9, .bytes = 4096};
  EXPECT_EQ(mapper.open(more, fetch(more)).status().code(), ErrorCode::kExhausted);
  EXPECT_EQ(fetched, 1);
}

TEST_F(PeerMappingsTest, AMappingThatIsDeniedNamesTheMemory) {
  const auto own = allocate();
  EXPECT_OK(devices->inject({.call = "mapShared", .code = ErrorCode::kUnsupported}));
  const auto denied = mapper.open(own.allocation, fetch(own.allocation));
  ASSERT_FALSE(denied.ok());
  EXPECT_EQ(denied.error().code, ErrorCode::kUnsupported);
  for (const char* part : {"memory 1 of rank 0 (epoch 1, 65536 bytes)", "device 1", "injected"})
    EXPECT_NE(denied.error().message.find(part), std::string::npos) << denied.error().message;
  EXPECT_EQ(mapper.bytesOf(0), 0u);
  EXPECT_EQ(open(own.allocation).memory.size(), kBytes);  // the next one works
}

TEST_F(PeerMappingsTest, WrongNamesAreRefused) {
  PeerAllocation named = allocate().allocation;
  open(named);
  named.bytes += 4096;
  EXPECT_EQ(mapper.open(named, fetch(named)).status().code(), ErrorCode::kMismatch);
  named.epoch = 7;
  EXPECT_EQ(mapper.open(named, fetch(named)).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(mapper.release(named, 1).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(owner.allocate(0, 1).status().code(), ErrorCode::kInvalidArgument);
}

TEST_F(PeerMappingsTest, TheOwnersLastDescriptorAndMappingMayGo) {
  auto own = std::make_unique<PeerMappings>(
      memory, PeerMappings::Settings{.device = 0, .owner = 5, .limit = kLimit});
  const auto made = valueOf(own->allocate(kBytes, 1));
  made.memory[99] = std::byte{5};
  const auto there =
      valueOf(mapper.open(made.allocation, [&] { return own->descriptorOf(made.allocation); }));
  own.reset();
  EXPECT_FALSE(isMapped(made.memory));
  EXPECT_EQ(there.memory[99], std::byte{5});
}

// ---- between processes

using mooncake::test::canFork;
using mooncake::test::ForkedChild;
using mooncake::test::SharedWithChildren;

struct Told {
  PeerAllocation allocation;
  std::atomic<uint32_t> round;  // that the child has written
};

// Writes the numbers of a round; each word differs from the round before.
void write(std::span<std::byte> memory, uint32_t round) {
  auto* const words = reinterpret_cast<uint32_t*>(memory.data());
  for (size_t i = 0; i < memory.size() / sizeof(uint32_t); ++i)
    words[i] = round * 7919 + static_cast<uint32_t>(i);
}

bool holds(std::span<const std::byte> memory, uint32_t round) {
  const auto* const words = reinterpret_cast<const uint32_t*>(memory.data());
  for (size_t i = 0; i < memory.size() / sizeof(uint32_t); ++i)
    if (words[i] != round * 7919 + static_cast<uint32_t>(i)) return false;
  return true;
}

// The process of rank 0: allocates, hands the descriptor over, and writes until it is killed.
void runOwner(Told& told, int socket, uint64_t epoch) {
  const auto devices = makeFakeDevices();
  PeerMappings own(*devices->peerMemory(), {.device = 0, .owner = 0, .limit = kLimit});
  const auto made = own.allocate(kBytes, epoch);
  if (!made.ok()) return;
  const auto descriptor = own.descriptorOf(made->allocation);
  told.allocation = made->allocation;
  const std::byte mark{1};
  if (!descriptor.ok() || !sendWithFd(socket, {&mark, 1}, descriptor->get()).ok()) return;
  const auto first = static_cast<uint32_t>(epoch) * 1000;
  for (uint32_t round = first;; ++round) {
    write(made->memory, round);
    told.round.store(round, std::memory_order_release);
  }
}

class PeerProcessTest : public PeerMappingsTest {
 protected:
  void SetUp() override {
    if (!canFork()) GTEST_SKIP() << "threads are left of other tests: run this one by itself";
  }
  // Starts an owner, and maps its memory.
  PeerMappings::Mapped start(uint64_t epoch) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    const Fd here(ends[0]);
    told->round = 0;
    child.emplace([&] { runOwner(*told, ends[1], epoch); });
    ::close(ends[1]);
    Fd descriptor;
    Bytes message;
    EXPECT_TRUE(eventually(
        [&] { return valueOf(receiveWithFd(here.get(), 1, message, descriptor)) == 1; }));
    EXPECT_TRUE(eventually([&] { return told->round != 0; }));
    return valueOf(
        mapper.open(told->allocation, [&] { return Result<Fd>(std::move(descriptor)); }));
  }
  void kill() {
    ASSERT_EQ(::kill(child->pid(), SIGKILL), 0);
    ASSERT_TRUE(eventually([&] { return child->look() == ForkedChild::Event::kEnded; }));
    EXPECT_TRUE(WIFSIGNALED(child->status()));
    child.reset();
  }

  SharedWithChildren<Told> told;
  std::optional<ForkedChild> child;
};

TEST_F(PeerProcessTest, AKilledOwnersMemoryIsReadAndWrittenOn) {
  const auto there = start(1);
  const uint32_t seen = told->round;
  // Reads and writes go on while the owner dies.
  std::atomic<bool> isOver{false};
  std::atomic<uint64_t> touched{0};
  std::thread reader([&] {
    volatile std::byte* const bytes = there.memory.data();
    for (size_t i = 0; !isOver; i = (i + 61) % kBytes) {
      bytes[i] = bytes[i];
      ++touched;
    }
  });
  EXPECT_TRUE(eventually([&] { return told->round > seen && touched > 1000; }));
  kill();
  const uint64_t before = touched;
  EXPECT_TRUE(eventually([&] { return touched > before + 1000; }));
  isOver = true;
  reader.join();
  write(there.memory, 123);
  EXPECT_TRUE(holds(there.memory, 123));
  const DeviceStream stream = devices->defaultStream(1);
  const auto host = valueOf(devices->allocatePinned(kBytes));
  EXPECT_OK(devices->copy(stream, host.data(), there.memory.data(), kBytes));
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_TRUE(holds(host, 123));
}

TEST_F(PeerProcessTest, ARestartedOwnerHasMemoryOfItsOwn) {
  const auto old = start(1);
  kill();
  write(old.memory, 77);
  const PeerAllocation oldName = told->allocation;
  const auto fresh = start(2);
  EXPECT_EQ(told->allocation.number, oldName.number);
  kill();
  EXPECT_TRUE(holds(old.memory, 77));
  EXPECT_GE(*reinterpret_cast<uint32_t*>(fresh.memory.data()), 2000u * 7919);
  EXPECT_OK(mapper.release(oldName, 1));
  EXPECT_OK(mapper.drained(1));
  EXPECT_FALSE(isMapped(old.memory));
  write(fresh.memory, 78);
  EXPECT_TRUE(holds(fresh.memory, 78));
}

}  // namespace
}  // namespace mooncake::testing
