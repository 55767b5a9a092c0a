#include "wires/shm/shm_transport.h"

#include <filesystem>
#include <future>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <set>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "child_process.h"
#include "engine/memory/fence_words.h"
#include "transport_suite.h"

namespace mooncake::testing {
namespace {

struct Shm {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return ShmTransport::create(context);
  }
  static EngineEnv env() { return {}; }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Shm, TransportSuite, Shm);

struct ShmEnd : WireEnd {
  explicit ShmEnd(bool crossMemoryAttach = true)
      : WireEnd(envWith(crossMemoryAttach), ShmTransport::create) {}

  static EngineEnv envWith(bool crossMemoryAttach) {
    EngineEnv env;
    env.crossMemoryAttach = crossMemoryAttach;
    return env;
  }
};

// Memory of any size that costs nothing: reads give the kernel's page of zeros.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes) : bytes_(bytes) {
    void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(mapped, MAP_FAILED);
    data_ = static_cast<std::byte*>(mapped);
  }
  ~SparseMemory() { ::munmap(data_, bytes_); }
  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* data_;
  size_t bytes_;
};

// A target of any size that costs 2 MiB, because it maps the same pages again and again.
class TiledMemory {
 public:
  explicit TiledMemory(size_t bytes) : room_((bytes + kTile - 1) / kTile * kTile), all_(room_) {
    const Fd tile(::memfd_create("tile", MFD_CLOEXEC));
    EXPECT_EQ(::ftruncate(tile.get(), kTile), 0);
    for (size_t at = 0; at < room_; at += kTile) {
      EXPECT_NE(::mmap(all_.data() + at, kTile, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                       tile.get(), 0),
                MAP_FAILED);
    }
  }
  std::byte* data() const { return all_.data(); }

 private:
  static constexpr size_t kTile = size_t(2) << 20;
  size_t room_;
  SparseMemory all_;
};

// The child's data: an engine with a window part, and memory outside of its arena.
struct Introduction {
  EngineId id{};
  Bytes endpoint;
  RemoteRegion part, user, huge;
};
constexpr size_t kPartBytes = 64 << 10;
constexpr size_t kUserBytes = 40 << 20;
constexpr size_t kHugeBytes = (size_t(5) << 30) / 2 + 12345;
constexpr std::byte kHugeFirst{0x11}, kHugeLast{0x99};

Bytes encode(const Introduction& child) {
  ByteWriter out;
  out.putRaw(child.id).putBytes(child.endpoint);
  for (const RemoteRegion& region : {child.part, child.user, child.huge}) {
    out.put(region.address).put(region.bytes).put(region.key);
  }
  return out.take();
}

Introduction decode(ByteView message) {
  ByteReader in(message);
  Introduction child;
  const auto id = in.getRaw(child.id.size());
  std::copy(id.begin(), id.end(), child.id.begin());
  const auto endpoint = in.getBytes(4096);
  child.endpoint.assign(endpoint.begin(), endpoint.end());
  for (RemoteRegion* region : {&child.part, &child.user, &child.huge}) {
    region->address = in.get<uint64_t>();
    region->bytes = in.get<uint64_t>();
    region->key = in.get<uint64_t>();
  }
  EXPECT_TRUE(in.finish("introduction").ok());
  return child;
}

TEST(ShmChild, DISABLED_Owner) {
  if (!ChildProcess::isChild()) GTEST_SKIP() << "runs in a child of other tests";
  ShmEnd side;
  Part part = side.part(kPartBytes);
  const Bytes content = pattern(kPartBytes / 2, 5);
  std::copy(content.begin(), content.end(), part.at(kPartBytes / 2, content.size()).begin());
  Bytes user = pattern(kUserBytes, 6);
  SparseMemory huge(kHugeBytes);
  huge.data()[0] = kHugeFirst;
  huge.data()[kHugeBytes - 1] = kHugeLast;
  auto userRegion = side.regions().add(user.data(), user.size(), kRemoteRead);
  auto hugeRegion = side.regions().add(huge.data(), huge.size(), kRemoteRead);
  ASSERT_TRUE(userRegion.ok() && hugeRegion.ok());
  sendMessage(ChildProcess::kToParent, encode({.id = side.id(),
                                               .endpoint = side.transport->endpoint(),
                                               .part = part.remote(),
                                               .user = userRegion->remote(),
                                               .huge = hugeRegion->remote()}));
  while (!receiveMessage(ChildProcess::kFromParent).empty()) {
  }
}

class ShmProcessTest : public ::testing::Test {
 protected:
  void connect(bool crossMemoryAttach) {
    side_ = std::make_unique<ShmEnd>(crossMemoryAttach);
    peer_ = decode(child_.receive());
    auto connected =
        connectNow(*side_->transport, peer_.id, peer_.endpoint, Deadline::after(kPatience));
    ASSERT_TRUE(connected.ok()) << connected.error().message;
    channel_ = std::move(*connected);
  }
  ErrorCode get(const RemoteRegion& region, uint64_t offset, std::span<std::byte> target) {
    Completion completion(&bell_);
    const Status begun = channel_->get({region, offset, target, &completion});
    return begun.ok() ? endOf(completion) : begun.code();
  }
  void expectUserMemory() {
    Bytes target(kUserBytes - 13);
    ASSERT_EQ(get(peer_.user, 13, target), ErrorCode::kOk);
    const Bytes expected = pattern(kUserBytes, 6);
    EXPECT_TRUE(std::equal(target.begin(), target.end(), expected.begin() + 13));
  }
  void expectHugeMemory() {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer takes 13 GiB to follow these bytes";
#endif
    const TiledMemory target(kHugeBytes);
    ASSERT_EQ(get(peer_.huge, 0, {target.data(), kHugeBytes}), ErrorCode::kOk);
    EXPECT_EQ(target.data()[kHugeBytes - 1], kHugeLast);
  }
  void expectPartIsReadable() {
    const Bytes expected = pattern(kPartBytes / 2, 5);
    Bytes target(expected.size());
    EXPECT_EQ(get(peer_.part, kPartBytes / 2, target), ErrorCode::kOk);
    EXPECT_EQ(target, expected);
  }

  ChildProcess child_{"ShmChild.DISABLED_Owner"};
  std::unique_ptr<ShmEnd> side_;
  Introduction peer_;
  std::shared_ptr<Channel> channel_;
  Doorbell bell_;
};

TEST_F(ShmProcessTest, ReadsUserMemory) {
  connect(true);
  expectUserMemory();
  expectPartIsReadable();
  EXPECT_EQ(child_.finish(), 0);
  EXPECT_TRUE(side_->endOf(peer_.id).ok()) << "a goodbye is no death";
}

TEST_F(ShmProcessTest, ReadsUserMemoryWithoutCrossMemoryAttach) {
  connect(false);
  expectUserMemory();
  EXPECT_EQ(child_.finish(), 0);
}

TEST_F(ShmProcessTest, FallsBackWhenTheKernelBeginsToRefuse) {
  connect(true);
  expectUserMemory();
  // A filter applies to the thread that installs it, so only its gets are refused.
  auto refused = std::async(std::launch::async, [&] {
    sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{.len = std::size(program), .filter = program};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
      return false;
    }
    EXPECT_LT(::syscall(SYS_process_vm_readv, child_.pid(), nullptr, 0, nullptr, 0, 0), 0);
    expectUserMemory();
    return true;
  });
  if (!refused.get()) GTEST_SKIP() << "no seccomp filters here";
  expectUserMemory();
}

TEST_F(ShmProcessTest, DeathInTheMiddleOfAGet) {
  connect(false);  // over the socket, so that there is a middle
  const SparseMemory target(kHugeBytes);
  Completion completion(&bell_);
  ASSERT_TRUE(channel_->get({peer_.huge, 0, {target.data(), kHugeBytes}, &completion}).ok());
  ASSERT_TRUE(eventually([&] {
    unsigned char touched = 0;  // set by the first bytes that arrive
    return ::mincore(target.data(), 1, &touched) == 0 && (touched & 1);
  }));
  child_.kill();
  EXPECT_EQ(endOf(completion), ErrorCode::kPeerLost);
  EXPECT_EQ(side_->endOf(peer_.id).code(), ErrorCode::kPeerLost);
  ASSERT_TRUE(eventually([&] {
    return channel_->put({peer_.part, 1024, {}, {64, stampOf(1)}}).code() == ErrorCode::kPeerLost;
  }));
  // The published part is still there.
  expectPartIsReadable();
  Bytes late(16);
  EXPECT_EQ(get(peer_.user, 0, late), ErrorCode::kPeerLost);
}

TEST_F(ShmProcessTest, DeathInTheMiddleOfACrossMemoryGet) {
  connect(true);
  Bytes target(kUserBytes);
  std::promise<void> running;
  auto reading = std::async(std::launch::async, [&] {
    ErrorCode code = get(peer_.user, 0, target);
    running.set_value();
    const auto patience = Deadline::after(kPatience);
    while (code == ErrorCode::kOk && !patience.passed()) code = get(peer_.user, 0, target);
    return code;
  });
  running.get_future().wait();
  child_.kill();
  EXPECT_EQ(reading.get(), ErrorCode::kPeerLost);
  expectPartIsReadable();
}

TEST_F(ShmProcessTest, LeavesNothingBehind) {
  const auto files = [] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      if (entry.path().string().find("mooncake") != std::string::npos) names.insert(entry.path());
    }
    return names;
  };
  connect(true);
  EXPECT_TRUE(files().empty());
  child_.kill();
  EXPECT_EQ(side_->endOf(peer_.id).code(), ErrorCode::kPeerLost);
  const auto again =
      connectNow(*side_->transport, peer_.id, peer_.endpoint, Deadline::after(kPatience));
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code, ErrorCode::kUnsupported) << "its socket is gone";
  EXPECT_TRUE(files().empty());
}

TEST_F(ShmProcessTest, SlowGetsMoreThanTwoGiB) {
  connect(true);
  expectHugeMemory();
}

TEST_F(ShmProcessTest, SlowGetsMoreThanTwoGiBWithoutCrossMemoryAttach) {
  connect(false);
  expectHugeMemory();
}

TEST_F(ShmProcessTest, DoesNotLeadToAnotherNetworkNamespace) {
  ShmEnd side;
  peer_ = decode(child_.receive());
  auto elsewhere = std::async(std::launch::async, [&]() -> ErrorCode {
    if (::unshare(CLONE_NEWNET) != 0) return ErrorCode::kOk;  // for this thread only
    const auto result =
        connectNow(*side.transport, peer_.id, peer_.endpoint, Deadline::after(kPatience));
    return result.ok() ? ErrorCode::kInvalidArgument : result.error().code;
  });
  const ErrorCode code = elsewhere.get();
  if (code == ErrorCode::kOk) GTEST_SKIP() << "no right to make a network namespace";
  EXPECT_EQ(code, ErrorCode::kUnsupported);
}

// The owner revokes memory outside of the arena.
TEST(Shm, RefusesUserMemoryThatWasRevoked) {
  for (const bool crossMemoryAttach : {true, false}) {
    ShmEnd a(crossMemoryAttach), b;
    auto toB = connectNow(a, b);
    ASSERT_TRUE(toB.ok());
    Bytes memory = pattern(10000, 1), target(10000);
    Doorbell bell;
    RemoteRegion remote;
    {
      auto region = b.regions().add(memory.data(), memory.size(), kRemoteRead);
      ASSERT_TRUE(region.ok());
      remote = region->remote();
      Completion completion(&bell);
      ASSERT_TRUE((*toB)->get({remote, 0, target, &completion}).ok());
      EXPECT_EQ(endOf(completion), ErrorCode::kOk);
      EXPECT_EQ(memory, target);
    }
    Completion completion(&bell);
    ASSERT_TRUE((*toB)->get({remote, 0, target, &completion}).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kRefused);
  }
}

// ---- words for peers that map our arena

TEST(ShmRoom, IsGivenBackByPeersThatLeaveAndIsNotForOthers) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer leaves no room for 8 TiB of mappings";
#endif
  constexpr size_t kLeaving = 5;
  ShmEnd a, b, leaving;
  const auto connect = [&] { return connectNow(b, a); };
  // Peers that say goodbye, while the channels to them stay.
  for (size_t i = 0; i < kLeaving; ++i) {
    auto channel = connectNow(leaving, a);
    ASSERT_TRUE(channel.ok()) << channel.error().message;
    ASSERT_TRUE(eventually([&] { return a.acceptedCount() == i + 1; }));
    const auto back = a.acceptedFrom(leaving.id());
    (*channel)->close();
    ASSERT_TRUE(
        eventually([&] { return back->send(bytesOf("x")).code() == ErrorCode::kPeerLost; }));
  }
  // Peers on which we have hung up, and that do not leave.
  std::vector<std::shared_ptr<Channel>> staying;
  auto channel = connect();
  for (; channel.ok() && staying.size() <= FenceWords::kMost; channel = connect()) {
    staying.push_back(*channel);
    const size_t accepted = kLeaving + staying.size();
    ASSERT_TRUE(eventually([&] { return a.acceptedCount() == accepted; }));
    a.acceptedFrom(b.id())->close();
  }
  EXPECT_EQ(staying.size(), FenceWords::kMost);
  ASSERT_FALSE(channel.ok());
  EXPECT_EQ(channel.error().code, ErrorCode::kUnsupported) << channel.error().message;
  // Such a peer is reached over another wire. Our channel objects are gone, but the words stay
  // taken.
  a.forgetAccepted();
  EXPECT_EQ(connect().error().code, ErrorCode::kUnsupported);
  staying.back()->close();
  EXPECT_EQ(connect().error().code, ErrorCode::kUnsupported) << "it may still look at its word";
  staying.pop_back();
  for (size_t looks = 0; looks < FenceWords::kMost && !(channel = connect()).ok(); looks += 256) {
  }
  EXPECT_TRUE(channel.ok()) << channel.error().message;
  if (channel.ok()) (*channel)->close();
  for (const auto& one : staying) one->close();
}

}  // namespace
}  // namespace mooncake::testing
