#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <net/if.h>
#include <sched.h>
#include <set>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>

#include "child_process.h"
#include "wires/nic/libfabric/cards.h"
#include "wires/nic/libfabric/report.h"

#ifdef MOONCAKE_WITH_LIBFABRIC
#include <rdma/fi_errno.h>

#include "wires/nic/libfabric/completion_errors.h"
#include "wires/nic/libfabric/library.h"
#include "wires/nic/libfabric/link_state.h"
#include "wires/nic/libfabric/operations.h"
#endif

namespace mooncake::testing {
namespace {

#ifdef MOONCAKE_WITH_LIBFABRIC

#define SKIP_WITHOUT_LIBFABRIC()                                        \
  if (const auto found = describeLibfabric(FabricEnv{}); !found.ok()) { \
    GTEST_SKIP() << found.error().message;                              \
  }

FabricEnv requiring(const std::string& provider, std::vector<std::string> devices = {}) {
  FabricEnv env;
  env.requiredProvider = provider;
  env.devices = std::move(devices);
  return env;
}

std::string refusalOf(const FabricEnv& env) {
  const auto cards = listLibfabricCards(env);
  EXPECT_FALSE(cards.ok());
  return cards.ok() ? "" : cards.error().message;
}

TEST(LibfabricLibrary, IsOneForTheProcess) {
  SKIP_WITHOUT_LIBFABRIC();
  const auto first = LibfabricLibrary::open(""), again = LibfabricLibrary::open("/no/such/file");
  ASSERT_TRUE(first.ok() && again.ok());
  EXPECT_EQ(*first, *again);
  EXPECT_GE((*first)->version(), uint32_t(FI_VERSION(1, 0)));
  EXPECT_LE((*first)->api(), uint32_t(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION)));
  EXPECT_LE((*first)->api(), (*first)->version());
  EXPECT_NE((*first)->path().find("libfabric"), std::string::npos);
}

TEST(LibfabricLibrary, TurnsTheProvidersOwnSharedMemoryOff) {
  SKIP_WITHOUT_LIBFABRIC();
  std::set<std::string> variables;
  for (char** variable = environ; *variable; ++variable) variables.insert(*variable);
  EXPECT_TRUE(variables.contains("FI_EFA_ENABLE_SHM_TRANSFER=0"));
}

// The handler before any library was opened; a sanitizer has one of its own.
const struct sigaction kAtStart = [] {
  struct sigaction now {};
  ::sigaction(SIGSEGV, nullptr, &now);
  return now;
}();

// Debian's copy loads libraries that would install crash handlers of their own.
TEST(LibfabricLibrary, LeavesTheSignalHandlers) {
  SKIP_WITHOUT_LIBFABRIC();
  struct sigaction now {};
  ::sigaction(SIGSEGV, nullptr, &now);
  EXPECT_EQ(now.sa_handler, kAtStart.sa_handler);
}

TEST(LibfabricLibrary, DISABLED_OpensAnother) {
  const auto opened = LibfabricLibrary::open("/no/such/libfabric.so.1");
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(opened.error().message.find("/no/such/libfabric.so.1"), std::string::npos);
}

TEST(LibfabricLibrary, SaysWhatWasTried) {
  ChildProcess child("LibfabricLibrary.DISABLED_OpensAnother");
  EXPECT_EQ(child.finish(), 0);
}

TEST(LibfabricCards, ARequiredProviderThatIsNotThereFailsClosed) {
  SKIP_WITHOUT_LIBFABRIC();
  if (listLibfabricCards(requiring("efa")).ok()) GTEST_SKIP() << "this machine has EFA";
  FabricEnv env = requiring("efa");
  env.providers = {"tcp;ofi_rxm"};  // available
  const std::string refusal = refusalOf(env);
  EXPECT_NE(refusal.find("no network card of provider efa"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("MOONCAKE_FABRIC_REQUIRE"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("tcp;ofi_rxm"), std::string::npos) << refusal;  // the available one
}

TEST(LibfabricCards, AnUnexpectedProviderIsNotTaken) {
  SKIP_WITHOUT_LIBFABRIC();
  if (listLibfabricCards(FabricEnv{}).ok()) GTEST_SKIP() << "this machine has EFA or verbs";
  const std::string refusal = refusalOf(FabricEnv{});
  EXPECT_NE(refusal.find("efa, verbs;ofi_rxm"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("MOONCAKE_FABRIC_PROVIDERS"), std::string::npos) << refusal;
}

TEST(LibfabricCards, TheFirstProviderThatHasCardsIsTaken) {
  SKIP_WITHOUT_LIBFABRIC();
  FabricEnv env;
  env.providers = {"no such provider", "sockets", "tcp;ofi_rxm"};
  const auto cards = listLibfabricCards(env);
  ASSERT_TRUE(cards.ok()) << cards.error().message;
  for (const LibfabricCard& card : *cards) EXPECT_EQ(card.provider, "sockets");
}

TEST(LibfabricCards, OnePerDeviceAndLoopbackOnlyWhereThereIsNothingElse) {
  SKIP_WITHOUT_LIBFABRIC();
  const auto cards = listLibfabricCards(requiring("tcp;ofi_rxm"));
  ASSERT_TRUE(cards.ok()) << cards.error().message;
  std::set<std::string> names;
  for (const LibfabricCard& card : *cards) EXPECT_TRUE(names.insert(card.name).second);
  EXPECT_TRUE(names.size() == 1 || !names.contains("lo"));
}

TEST(LibfabricCards, ByNameByAddressAndExcluded) {
  SKIP_WITHOUT_LIBFABRIC();
  const auto named = listLibfabricCards(requiring("tcp;ofi_rxm", {"lo"}));
  ASSERT_TRUE(named.ok()) << named.error().message;
  ASSERT_EQ(named->size(), 1u);
  EXPECT_EQ(named->front().name, "lo");

  const std::vector<std::string> addresses{"127.0.0.3", "127.0.0.2"};
  auto env = requiring("tcp;ofi_rxm", addresses);
  const auto several = listLibfabricCards(env);
  ASSERT_TRUE(several.ok()) << several.error().message;
  ASSERT_EQ(several->size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*several)[i].name, addresses[i]);
    const auto opened = openLibfabricNic((*several)[i], env);
    ASSERT_TRUE(opened.ok()) << opened.error().message;
    EXPECT_EQ((*opened)->name(), addresses[i]);
  }
  env.excludedDevices = {"127.0.0.3"};
  EXPECT_EQ(listLibfabricCards(env)->size(), 1u);

  const std::string refusal = refusalOf(requiring("tcp;ofi_rxm", {"eth99"}));
  EXPECT_NE(refusal.find("eth99"), std::string::npos) << refusal;
}

TEST(LibfabricReport, TellsTheLibraryTheCardsAndTheChoice) {
  SKIP_WITHOUT_LIBFABRIC();
  const auto findings = reportFabric(requiring("tcp;ofi_rxm", {"127.0.0.1"}));
  ASSERT_GE(findings.size(), 3u);
  EXPECT_EQ(findings[0].subject, "libfabric");
  EXPECT_NE(findings[0].text.find("libfabric.so"), std::string::npos);
  EXPECT_NE(findings[1].text.find("127.0.0.1"), std::string::npos);
  EXPECT_NE(findings[1].text.find("MOONCAKE_FABRIC_REQUIRE"), std::string::npos);
  EXPECT_EQ(findings[2].subject, "cards for cpu:0");
  for (const FabricFinding& one : findings) EXPECT_TRUE(one.works) << one.text;

  const auto missing = reportFabric(requiring("no such provider"));
  ASSERT_EQ(missing.size(), 2u);
  EXPECT_FALSE(missing[1].works);
}

TEST(LibfabricCards, TheDepthIsTheSmallerOfTheTwo) {
  SKIP_WITHOUT_LIBFABRIC();
  auto env = requiring("tcp;ofi_rxm", {"127.0.0.1"});
  const auto cards = listLibfabricCards(env);
  ASSERT_TRUE(cards.ok());
  const auto all = openLibfabricNic(cards->front(), env);
  ASSERT_TRUE(all.ok());
  env.mostUnderWay = 7;
  const auto seven = openLibfabricNic(cards->front(), env);
  ASSERT_TRUE(seven.ok());
  EXPECT_EQ((*seven)->limits().sendDepth, 7u);
  env.mostUnderWay = 1 << 20;
  const auto many = openLibfabricNic(cards->front(), env);
  ASSERT_TRUE(many.ok());
  EXPECT_EQ((*many)->limits().sendDepth, (*all)->limits().sendDepth);
}

TEST(LibfabricCards, KeysCannotBeGuessed) {
  SKIP_WITHOUT_LIBFABRIC();
  const auto env = requiring("tcp;ofi_rxm", {"127.0.0.1"});
  const auto nic = openLibfabricNic(listLibfabricCards(env)->front(), env);
  ASSERT_TRUE(nic.ok());
  Bytes memory(4096);
  std::set<uint64_t> high;
  for (int i = 0; i < 16; ++i) {
    auto registered = (*nic)->registerMemory(memory, 3);
    ASSERT_TRUE(registered.ok());
    high.insert((*registered)->key().key >> 32);
  }
  EXPECT_EQ(high.size(), 16u);
}

// ---- memory that the processor cannot touch, in place of GPU memory

class FakeGpu final : public MemoryPlaces {
 public:
  FakeGpu()
      : memory_(static_cast<std::byte*>(
                    ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
                kBytes) {}
  ~FakeGpu() override { ::munmap(memory_.data(), kBytes); }
  bool hasDevice() const override { return true; }
  NicMemoryPlace of(const std::byte* at) const override {
    return {.isCuda = at >= memory_.data() && at < memory_.data() + kBytes};
  }
  std::span<std::byte> memory() const { return memory_; }

  static constexpr size_t kBytes = 1 << 20;

 private:
  const std::span<std::byte> memory_;
};

struct NoGpu final : MemoryPlaces {
  bool hasDevice() const override { return false; }
  NicMemoryPlace of(const std::byte*) const override { return {}; }
};

// libfabric#12328: the provider's own path within a host assembles messages with memcpy, even if
// the receiver's memory is a GPU's. The first byte that arrives ends the process.
TEST(LibfabricGpuTrap, DISABLED_ReceivesIntoGpuMemoryOverShm) {
  if (!ChildProcess::isChild()) GTEST_SKIP();
  const FakeGpu gpu;
  const NoGpu blind;  // reports GPU memory as the host's
  const auto env = requiring("shm");
  const auto cards = listLibfabricCards(env);
  ASSERT_TRUE(cards.ok());
  auto a = openLibfabricNic(cards->front(), env, blind);
  auto b = openLibfabricNic(cards->front(), env, blind);
  ASSERT_TRUE(a.ok() && b.ok());
  auto target = (*b)->registerMemory(gpu.memory(), 0);
  ASSERT_TRUE(target.ok());
  ASSERT_TRUE((*b)->receive({gpu.memory(), target->get()}, nullptr).ok());
  Bytes source(64 << 10);
  auto registered = (*a)->registerMemory(source, 0);
  ASSERT_TRUE(registered.ok());
  const auto peer = (*a)->insert((*b)->address());
  ASSERT_TRUE((*a)->send(*peer, {source, registered->get()}, {}, nullptr).ok());
  std::array<NicCompletion, 4> some;
  for (const auto deadline = Deadline::after(std::chrono::seconds(10)); !deadline.passed();) {
    (*a)->poll(some);
    (*b)->poll(some);
  }
}

TEST(LibfabricGpuTrap, TheProvidersOwnPathCrashesOnGpuMemory) {
  SKIP_WITHOUT_LIBFABRIC();
  ChildProcess child("LibfabricGpuTrap.DISABLED_ReceivesIntoGpuMemoryOverShm",
                     {{"FI_SHM_DISABLE_CMA", "1"},
                      {"ASAN_OPTIONS", "handle_segv=0"},
                      {"TSAN_OPTIONS", "handle_segv=0"}});
  const std::string own = std::to_string(child.pid()) + ":";
  const int status = child.finish();
  // Removes the files that the provider would have removed at its end.
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().starts_with(own)) std::filesystem::remove(entry.path());
  }
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
}

// Our code asks where memory lies. It refuses memory that the provider would touch with the
// processor.
TEST(LibfabricGpuTrap, OursRefusesInstead) {
  SKIP_WITHOUT_LIBFABRIC();
  const FakeGpu gpu;
  for (const auto& [provider, device] : {std::pair("shm", ""), std::pair("sockets", "127.0.0.1")}) {
    const auto env = requiring(
        provider, *device ? std::vector<std::string>{device} : std::vector<std::string>{});
    const auto cards = listLibfabricCards(env);
    ASSERT_TRUE(cards.ok());
    auto nic = openLibfabricNic(cards->front(), env, gpu);
    ASSERT_TRUE(nic.ok());
    EXPECT_FALSE((*nic)->limits().deviceMemory);
    const auto refused = (*nic)->registerMemory(gpu.memory(), 0);
    ASSERT_FALSE(refused.ok()) << provider;
    EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
    Bytes host(4096);
    EXPECT_TRUE((*nic)->registerMemory(host, 0).ok());
  }
}

// Provider shm names an endpoint after its process id, which may exist in another container, too.
TEST(LibfabricShm, ANameThatIsTakenSaysWhatToDo) {
  SKIP_WITHOUT_LIBFABRIC();
  const auto env = requiring("shm");
  const auto cards = listLibfabricCards(env);
  ASSERT_TRUE(cards.ok());
  const NoGpu none;
  auto first = openLibfabricNic(cards->front(), env, none);
  ASSERT_TRUE(first.ok()) << first.error().message;
  const std::string own = std::to_string(::getpid()) + ":" + std::to_string(::getuid()) + ":";
  int last = -1;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(own)) last = std::max(last, std::atoi(name.c_str() + own.size()));
  }
  ASSERT_GE(last, 0);
  const std::filesystem::path folder("/dev/shm");
  std::vector<std::filesystem::path> taken;
  for (int next = last + 1; next < last + 4; ++next) {
    taken.push_back(folder / (own + std::to_string(next)));
    std::filesystem::copy_file(folder / (own + std::to_string(last)), taken.back());
  }
  const auto second = openLibfabricNic(cards->front(), env, none);
  for (const auto& path : taken) std::filesystem::remove(path);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.error().message.find("Give each container"), std::string::npos)
      << second.error().message;
}

// ---- parts

TEST(NicErrors, OfEfaOfVerbsAndOfWhatIsUnknown) {
  EXPECT_EQ(nicErrorOf("efa", FI_EINVAL, 7), NicError::kRefused);
  for (const int gone : {8, 9, 10, 13, 14, 15, 4124, 4126})
    EXPECT_EQ(nicErrorOf("efa", FI_EOTHER, gone), NicError::kUnreachable) << gone;
  EXPECT_EQ(nicErrorOf("efa", FI_ECANCELED, 1), NicError::kCancelled);
  EXPECT_EQ(nicErrorOf("efa", FI_EINVAL, 2), NicError::kDevice);
  EXPECT_EQ(nicErrorOf("efa", FI_EIO, 4096), NicError::kUnreachable);
  EXPECT_EQ(nicErrorOf("verbs;ofi_rxm", FI_EIO, 10), NicError::kRefused);
  EXPECT_EQ(nicErrorOf("verbs;ofi_rxm", FI_EIO, 12), NicError::kUnreachable);
  EXPECT_EQ(nicErrorOf("verbs;ofi_rxm", FI_EIO, 4), NicError::kDevice);
  EXPECT_EQ(nicErrorOf("tcp;ofi_rxm", FI_ECANCELED, 0), NicError::kUnreachable);
  EXPECT_EQ(nicErrorOf("sockets", FI_EACCES, 0), NicError::kRefused);
  EXPECT_EQ(nicErrorOf("sockets", FI_ENODEV, 0), NicError::kDevice);
}

TEST(LinkState, OfARdmaDeviceIsReadFromSysfs) {
  std::string root = "/tmp/mooncake-link-XXXXXX";
  ASSERT_NE(::mkdtemp(root.data()), nullptr);
  const std::string folder = root + "/class/infiniband/rdmap79s0/ports/1";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/state") << "4: ACTIVE\n";
  const LinkState rdma("rdmap79s0", root), unknown("shm", root), none("", root);
  for (const LinkState* link : {&rdma, &unknown, &none}) EXPECT_FALSE(link->isDown());
  std::ofstream(folder + "/state") << "1: DOWN\n";
  EXPECT_TRUE(rdma.isDown());
  std::filesystem::remove_all(root);
  EXPECT_TRUE(rdma.isDown());  // the device itself has gone
  EXPECT_FALSE(unknown.isDown());
}

// In a new network namespace loopback is down at first.
TEST(LinkState, OfAnInterfaceIsAskedOfTheKernelInItsOwnNetwork) {
  const LinkState outside("lo");
  bool hasNamespaces = false, wasDown = false, isUp = false;
  std::thread([&] {
    hasNamespaces = ::unshare(CLONE_NEWNET) == 0;
    if (!hasNamespaces) return;
    const LinkState lo("lo");
    wasDown = lo.isDown();
    const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq request{};
    std::strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP;
    isUp = ::ioctl(socket.get(), SIOCSIFFLAGS, &request) == 0 && !lo.isDown();
  }).join();
  if (!hasNamespaces) GTEST_SKIP() << "no network namespaces here";
  EXPECT_TRUE(wasDown);
  EXPECT_TRUE(isUp);
  EXPECT_FALSE(outside.isDown());
}

TEST(NicOperations, AreFoundByWhatTheProviderGivesBack) {
  NicOperations operations(3);
  NicOperation* one = operations.take();
  NicOperation* two = operations.take();
  ASSERT_TRUE(one && two && operations.take());
  EXPECT_EQ(operations.take(), nullptr);
  EXPECT_EQ(operations.find(&one->provider), one);
  EXPECT_EQ(operations.find(&two->provider), two);
  EXPECT_EQ(operations.find(nullptr), nullptr);
  EXPECT_EQ(operations.find(reinterpret_cast<char*>(one) + 8), nullptr);
  int elsewhere = 0;
  EXPECT_EQ(operations.find(&elsewhere), nullptr);
  operations.giveBack(*two);
  EXPECT_EQ(operations.take(), two);
}

#else

TEST(LibfabricCards, ABuildWithoutItSaysWhatIsMissing) {
  const auto found = describeLibfabric(FabricEnv{});
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(found.error().message.find("rdma/fabric.h"), std::string::npos);
  EXPECT_FALSE(listLibfabricCards(FabricEnv{}).ok());
  EXPECT_FALSE(openLibfabricNic({}, FabricEnv{}).ok());
}

#endif

}  // namespace
}  // namespace mooncake::testing
