#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <span>
#include <string>
#include <sys/socket.h>
#include <unistd.h>

#include "base/unix_socket.h"
#include "child_process.h"
#include "device/accelerator_suite.h"
#include "device/kernel_launch.h"
#include "device/peer_memory.h"
#include "kernels/probe.h"

// Tests of kernels and of memory that processes share, which every accelerator with devices must
// pass. The kinds are those of AcceleratorSuite, with two members more:
//
//   static constexpr const char* kChild = "Fake/PeerMemorySuite/0.DISABLED_IsTheOwner";
//   void useKernels();  // gives the accelerator kernels if it has none by itself
//   INSTANTIATE_TYPED_TEST_SUITE_P(Fake, PeerMemorySuite, FakeKind);
namespace mooncake::testing {

template <typename Kind>
class PeerMemorySuite : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = 1 << 20, kWords = kBytes / sizeof(uint32_t);

  void SetUp() override {
    auto opened = Kind::open();
    if (!opened.ok()) GTEST_SKIP() << opened.error().message;
    kind = std::move(*opened);
    const Status shares = peers().checkSharing(0);
    if (!shares.ok()) GTEST_SKIP() << shares.error().message;
    stream = valueOf(accelerator().createStream(0));
    host = valueOf(accelerator().allocatePinned(kBytes));
    ASSERT_FALSE(host.empty());
  }
  void TearDown() override {
    if (host.empty()) return;
    EXPECT_OK(accelerator().synchronize(stream));
    accelerator().destroyStream(stream);
    accelerator().freePinned(host);
  }

  Accelerator& accelerator() { return kind->accelerator(); }
  PeerMemory& peers() { return *accelerator().peerMemory(); }
  uint32_t* words() { return reinterpret_cast<uint32_t*>(host.data()); }

  void write(std::span<std::byte> memory, uint32_t seed) {
    for (size_t i = 0; i < kWords; ++i) words()[i] = seed * 7919 + static_cast<uint32_t>(i);
    EXPECT_OK(accelerator().copy(stream, memory.data(), host.data(), kBytes));
    EXPECT_OK(accelerator().synchronize(stream));
  }
  // Whether word i of the memory is `first` + i.
  bool counts(std::span<const std::byte> memory, uint32_t first) {
    std::memset(host.data(), 0xa5, kBytes);
    EXPECT_OK(accelerator().copy(stream, host.data(), memory.data(), kBytes));
    EXPECT_OK(accelerator().synchronize(stream));
    for (size_t i = 0; i < kWords; ++i)
      if (words()[i] != first + static_cast<uint32_t>(i)) return false;
    return true;
  }
  bool holds(std::span<const std::byte> memory, uint32_t seed) {
    return counts(memory, seed * 7919);
  }

  // Writes by a kernel.
  Status probe(std::span<std::byte> memory, uint32_t value, bool isCooperative) {
    const kernels::ProbeArguments arguments{
        .out = reinterpret_cast<uint32_t*>(memory.data()), .count = kWords, .value = value};
    KernelLaunch launch{.grid = kWords / 1024, .block = 1024, .arguments = bytesOf(arguments)};
    if (!isCooperative) return accelerator().launch(stream, launch);
    const auto room = valueOf(accelerator().roomFor(launch, 0));
    EXPECT_GE(room.blocks(), 1);
    launch.isCooperative = true;
    launch.grid = std::min<uint32_t>(launch.grid, static_cast<uint32_t>(room.blocks()));
    return accelerator().launch(stream, launch);
  }

  std::unique_ptr<Kind> kind;
  DeviceStream stream;
  std::span<std::byte> host;
};

TYPED_TEST_SUITE_P(PeerMemorySuite);

TYPED_TEST_P(PeerMemorySuite, TwoMappingsShowOneMemory) {
  PeerMemory& peers = this->peers();
  const auto made = valueOf(peers.allocateShared(0, this->kBytes));
  ASSERT_GE(made.memory.size(), this->kBytes);
  this->write(made.memory, 3);
  const auto there = valueOf(peers.mapShared(made.descriptor, made.memory.size(), 0));
  EXPECT_TRUE(this->holds(there, 3));
  this->write(there, 4);
  EXPECT_TRUE(this->holds(made.memory, 4));
  const auto place = valueOf(this->accelerator().placeOf(there.data()));
  EXPECT_EQ(place.kind, MemoryKind::kDevice);
  EXPECT_EQ(place.device, 0);
  EXPECT_OK(peers.unmapShared(made.memory));
  EXPECT_TRUE(this->holds(there, 4));
  EXPECT_OK(peers.unmapShared(there));
  EXPECT_EQ(peers.unmapShared(there).code(), ErrorCode::kInvalidArgument);
}

TYPED_TEST_P(PeerMemorySuite, KernelsWriteSharedMemory) {
  this->kind->useKernels();
  const Status prepared = this->accelerator().prepareKernels(0);
  if (prepared.code() == ErrorCode::kUnsupported) GTEST_SKIP() << prepared.error().message;
  ASSERT_TRUE(prepared.ok()) << prepared.error().message;
  PeerMemory& peers = this->peers();
  const auto made = valueOf(peers.allocateShared(0, this->kBytes));
  const auto there = valueOf(peers.mapShared(made.descriptor, made.memory.size(), 0));
  EXPECT_OK(this->probe(there, 100, false));
  EXPECT_TRUE(this->counts(made.memory, 100));
  EXPECT_OK(this->probe(made.memory, 9000, true));
  EXPECT_FALSE(this->counts(there, 100));
  EXPECT_EQ(this->words()[17], 9017u);
  EXPECT_OK(peers.unmapShared(made.memory));
  EXPECT_OK(peers.unmapShared(there));
}

// The process that owns the memory: writes it, hands it over, and waits for its end.
TYPED_TEST_P(PeerMemorySuite, DISABLED_IsTheOwner) {
  if (!ChildProcess::isChild()) GTEST_SKIP();
  const Bytes name = receiveMessage(ChildProcess::kFromParent);
  const auto made = valueOf(this->peers().allocateShared(0, this->kBytes));
  this->write(made.memory, 5);
  const auto socket =
      valueOf(connectAbstract(std::string(reinterpret_cast<const char*>(name.data()), name.size()),
                              Deadline::after(kDevicePatience)));
  const Bytes size = ByteWriter().put(static_cast<uint64_t>(made.memory.size())).take();
  EXPECT_OK(sendWithFd(socket.get(), size, made.descriptor.get()));
  receiveMessage(ChildProcess::kFromParent);
}

TYPED_TEST_P(PeerMemorySuite, MemoryOutlivesTheProcessThatIsKilled) {
  static std::atomic<int> tests{0};
  const std::string name =
      "mooncake-peer-" + std::to_string(::getpid()) + "-" + std::to_string(tests++);
  const auto listener = valueOf(listenAbstract(name));
  ChildProcess owner(TypeParam::kChild);
  owner.send(std::as_bytes(std::span(name)));
  Fd socket, descriptor;
  ASSERT_TRUE(eventually([&] {
    socket = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    return bool(socket);
  }));
  Bytes size;
  ASSERT_TRUE(eventually([&] {
    return receiveWithFd(socket.get(), sizeof(uint64_t) - size.size(), size, descriptor).ok() &&
           size.size() == sizeof(uint64_t);
  }));
  const auto bytes = ByteReader(size).template get<uint64_t>();
  const auto there = valueOf(this->peers().mapShared(descriptor, bytes, 0));
  EXPECT_TRUE(this->holds(there, 5));
  descriptor.reset();
  owner.kill();
  EXPECT_TRUE(this->holds(there, 5));
  this->write(there, 6);
  EXPECT_TRUE(this->holds(there, 6));
  this->kind->useKernels();
  if (this->accelerator().prepareKernels(0).ok()) {
    EXPECT_OK(this->probe(there, 700, false));
    EXPECT_TRUE(this->counts(there, 700));
  }
  EXPECT_OK(this->peers().unmapShared(there));
}

REGISTER_TYPED_TEST_SUITE_P(PeerMemorySuite, TwoMappingsShowOneMemory, KernelsWriteSharedMemory,
                            DISABLED_IsTheOwner, MemoryOutlivesTheProcessThatIsKilled);

}  // namespace mooncake::testing
