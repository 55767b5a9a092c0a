// The buffers of packets, which channels share.
#include "wires/packets/packet_pool.h"

#include <deque>

#include "engine_side.h"
#include "wires/packets/out_packet.h"

namespace mooncake::testing {
namespace {

TEST(PacketPoolTest, ChannelsThatGiveNothingBackLeaveBuffers) {
  constexpr size_t kCount = 512;
  auto pool = PacketPool::create(PacketPool::kReserve + kCount, 4096);
  ASSERT_TRUE(pool.ok());
  std::deque<PacketPool::Share> silent;
  for (int i = 0; i < 20; ++i) silent.emplace_back(**pool);
  PacketPool::Share healthy(**pool);
  std::vector<std::shared_ptr<OutPacket>> held;
  const auto takeAll = [&](PacketPool::Share& share) {
    const size_t before = held.size();
    while (auto packet = OutPacket::make(**pool, share)) held.push_back(std::move(packet));
    return held.size() - before;
  };
  EXPECT_GE(takeAll(silent[0]), 128u) << "one that sends alone has the window of a path";
  for (size_t i = 1; i < silent.size(); ++i) takeAll(silent[i]);
  EXPECT_GE(takeAll(healthy), kCount / 2 / 21);
  EXPECT_TRUE(OutPacket::make(**pool, healthy, /*isUrgent=*/true)) << "for what gives room";
}

TEST(PacketPoolTest, APacketMovesOutOfItsBufferAndInAgain) {
  auto pool = PacketPool::create(PacketPool::kReserve + 1, 4096);
  ASSERT_TRUE(pool.ok());
  PacketPool::Share share(**pool), other(**pool);
  const auto packet = OutPacket::make(**pool, share);
  ASSERT_TRUE(packet);
  const Bytes data = pattern(1000, 1);
  std::ranges::copy(data, packet->data());
  packet->length = data.size();
  packet->enterCard();
  EXPECT_FALSE(packet->moveOut()) << "a card may read it";
  packet->leaveCard();
  EXPECT_FALSE(OutPacket::make(**pool, other));
  EXPECT_TRUE(packet->moveOut());
  EXPECT_FALSE(packet->moveOut());
  EXPECT_TRUE(std::ranges::equal(packet->bytes(), data));
  auto taken = OutPacket::make(**pool, other);
  ASSERT_TRUE(taken);
  EXPECT_FALSE(packet->moveIn());
  std::ranges::fill(std::span(taken->data(), 4096), std::byte{9});
  taken.reset();
  EXPECT_TRUE(packet->moveIn());
  EXPECT_TRUE(std::ranges::equal(packet->bytes(), data));
}

}  // namespace
}  // namespace mooncake::testing
