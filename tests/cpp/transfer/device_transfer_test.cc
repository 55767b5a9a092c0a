#include <array>
#include <cstring>
#include <future>
#include <gtest/gtest.h>
#include <tuple>
#include <vector>

#include "device/fake/fake_devices.h"
#include "engine_side.h"
#include "transfer/transfer_engine.h"

// Transfers between memory of devices and of the host. Both engines are in this process, or they are
// the same one.
namespace mooncake::transfer {
namespace {

using mooncake::testing::pattern;

std::shared_ptr<TransferEngine> makeEngine(const std::string& wire) {
  TransferEngineOptions options{.localName = "127.0.0.1", .metadataServer = "P2PHANDSHAKE"};
  options.env.transports = {wire};
  auto made = TransferEngine::open(std::move(options));
  EXPECT_TRUE(made.ok()) << made.error().message;
  return made.ok() ? *made : nullptr;
}

// Memory of a fake device, or of the host (device -1).
class Memory {
 public:
  Memory(int device, size_t bytes) : isOfDevice_(device >= 0) {
    if (!isOfDevice_) {
      host_.resize(bytes);
      span_ = host_;
      return;
    }
    const auto allocated = fakeDevices().allocate(device, bytes);
    EXPECT_TRUE(allocated.ok());
    span_ = *allocated;
  }
  ~Memory() {
    if (isOfDevice_) fakeDevices().free(span_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void fill(const Bytes& bytes) { std::memcpy(span_.data(), bytes.data(), bytes.size()); }
  Bytes copy() const { return Bytes(span_.begin(), span_.end()); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(span_.data()); }
  size_t bytes() const { return span_.size(); }

 private:
  const bool isOfDevice_;
  Bytes host_;
  std::span<std::byte> span_;
};

using Case = std::tuple<std::string, int, int>;  // wire, device here, device there

class DeviceTransferTest : public ::testing::TestWithParam<Case> {
 protected:
  std::string wire() const { return std::get<0>(GetParam()); }
  bool isLocal() const { return wire() == "local"; }

  const std::shared_ptr<TransferEngine> here_ = makeEngine(isLocal() ? "tcp" : wire());
  const std::shared_ptr<TransferEngine> there_ = isLocal() ? here_ : makeEngine(wire());
};

std::string nameOf(const ::testing::TestParamInfo<Case>& info) {
  const auto place = [](int device) {
    return device < 0 ? std::string("Host") : "Device" + std::to_string(device);
  };
  const auto& [wire, here, there] = info.param;
  return wire + "_" + place(here) + "_" + place(there);
}

INSTANTIATE_TEST_SUITE_P(Wires, DeviceTransferTest,
                         ::testing::Combine(::testing::Values("tcp", "inproc", "local"),
                                            ::testing::Values(-1, 0), ::testing::Values(-1, 0, 1)),
                         nameOf);

// Up to 5 MiB, so that data lanes take parts of it.
TEST_P(DeviceTransferTest, DataIsRightBothWays) {
  const auto [wire, deviceHere, deviceThere] = GetParam();
  constexpr size_t kMost = 5'000'011;
  Memory mine(deviceHere, kMost), theirs(deviceThere, kMost);
  ASSERT_EQ(here_->registerMemory(mine.address(), kMost), kGood);
  ASSERT_EQ(there_->registerMemory(theirs.address(), kMost), kGood);
  const auto segment = here_->openSegment(there_->session());
  ASSERT_NE(segment, nullptr);
  EXPECT_EQ(here_->transportTo(there_->session()), wire);
  uint64_t seed = 0;
  for (const size_t bytes : {size_t(1), size_t(4097), size_t(262'145), kMost}) {
    const Bytes written = pattern(bytes, ++seed), read = pattern(bytes, ++seed);
    mine.fill(written);
    const TransferRequest write{Opcode::kWrite, mine.address(), segment, theirs.address(), bytes};
    ASSERT_EQ(here_->transfer({&write, 1}), kGood);
    const Bytes there = theirs.copy();
    EXPECT_TRUE(std::equal(written.begin(), written.end(), there.begin())) << bytes;
    theirs.fill(read);
    const TransferRequest get{Opcode::kRead, mine.address(), segment, theirs.address(), bytes};
    ASSERT_EQ(here_->transfer({&get, 1}), kGood);
    const Bytes here = mine.copy();
    EXPECT_TRUE(std::equal(read.begin(), read.end(), here.begin())) << bytes;
  }
  EXPECT_EQ(here_->unregisterMemory(mine.address()), kGood);
  EXPECT_EQ(there_->unregisterMemory(theirs.address()), kGood);
}

// A batch whose parts lie at odd places.
TEST_P(DeviceTransferTest, ABatchMovesManyParts) {
  const auto [wire, deviceHere, deviceThere] = GetParam();
  constexpr size_t kParts = 200, kStep = 4099;
  Memory mine(deviceHere, kParts * kStep), theirs(deviceThere, kParts * kStep);
  const Bytes data = pattern(mine.bytes(), 7);
  mine.fill(data);
  theirs.fill(Bytes(theirs.bytes()));
  ASSERT_EQ(here_->registerMemory(mine.address(), mine.bytes()), kGood);
  ASSERT_EQ(there_->registerMemory(theirs.address(), theirs.bytes()), kGood);
  const auto segment = here_->openSegment(there_->session());
  std::vector<TransferRequest> requests;
  for (size_t i = 0; i < kParts; ++i) {
    requests.push_back({Opcode::kWrite, mine.address() + i * kStep, segment,
                        theirs.address() + (kParts - 1 - i) * kStep, kStep});
  }
  const auto batch = here_->allocateBatch(kParts);
  ASSERT_EQ(here_->submit(batch, requests), kGood);
  ASSERT_EQ(here_->await(*batch), kGood);
  const Bytes there = theirs.copy();
  for (size_t i = 0; i < kParts; ++i) {
    ASSERT_TRUE(std::equal(data.begin() + i * kStep, data.begin() + (i + 1) * kStep,
                           there.begin() + (kParts - 1 - i) * kStep))
        << i;
  }
  EXPECT_EQ(here_->release(batch->id), kGood);
  EXPECT_EQ(here_->unregisterMemory(mine.address()), kGood);
  EXPECT_EQ(there_->unregisterMemory(theirs.address()), kGood);
}

TEST(DeviceMemory, BytesAreWrittenAndReadHere) {
  const auto engine = makeEngine("tcp");
  Memory memory(1, 10'000);
  ASSERT_EQ(engine->registerMemory(memory.address(), memory.bytes()), kGood);
  const Bytes data = pattern(9'000, 3);
  ASSERT_EQ(engine->writeHere(memory.address() + 500, data), kGood);
  Bytes back(9'000);
  ASSERT_EQ(engine->readHere(memory.address() + 500, back), kGood);
  EXPECT_TRUE(back == data);
}

TEST(DeviceMemory, ARangeHasOneOwner) {
  const auto engine = makeEngine("tcp");
  Memory memory(0, 4096);
  EXPECT_EQ(engine->registerMemory(memory.address(), size_t(1) << 20), kInvalid);
  ASSERT_TRUE(fakeDevices().inject({.call = "placeOf"}).ok());
  EXPECT_EQ(engine->registerMemory(memory.address(), 4096), kInvalid);
  EXPECT_EQ(engine->registerMemory(memory.address(), 4096), kGood);
}

TEST(DeviceMemory, AFailedCopyFailsItsTransferOnly) {
  const auto here = makeEngine("tcp"), there = makeEngine("tcp");
  constexpr size_t kBytes = 900'001;
  Memory mine(0, kBytes), theirs(1, kBytes);
  ASSERT_EQ(here->registerMemory(mine.address(), kBytes), kGood);
  ASSERT_EQ(there->registerMemory(theirs.address(), kBytes), kGood);
  const auto segment = here->openSegment(there->session());
  for (const Opcode opcode : {Opcode::kWrite, Opcode::kRead}) {
    const TransferRequest request{opcode, mine.address(), segment, theirs.address(), kBytes};
    for (const uint64_t n : {1, 2, 5}) {
      ASSERT_TRUE(fakeDevices().inject({.call = "copy", .n = n}).ok());
      EXPECT_EQ(here->transfer({&request, 1}), kInvalid);
      const Bytes data = pattern(kBytes, n);
      (opcode == Opcode::kWrite ? mine : theirs).fill(data);
      EXPECT_EQ(here->transfer({&request, 1}), kGood);
      EXPECT_TRUE((opcode == Opcode::kWrite ? theirs : mine).copy() == data);
    }
  }
}

}  // namespace
}  // namespace mooncake::transfer
