#include "wires/tcp/host_address.h"

#include <gtest/gtest.h>

#include "engine_side.h"
#include "wires/tcp/socket.h"

namespace mooncake {
namespace {

HostAddress address(const char* text) {
  const auto parsed = HostAddress::parse(text);
  EXPECT_TRUE(parsed.ok()) << text;
  return *parsed;
}

const std::vector<HostInterface> kHost = {
    {"lo", address("127.0.0.1"), false},       {"lo", address("::1"), false},
    {"docker0", address("172.17.0.1"), false}, {"eth1", address("192.168.5.1"), false},
    {"eth0", address("fd00::5"), true},        {"eth0", address("10.0.0.5"), true},
};

std::string choose(const std::vector<HostInterface>& host, std::optional<std::string> wanted = {},
                   std::optional<HostAddress> towards = {}) {
  const auto chosen = chooseHostAddress(host, wanted, towards);
  return chosen.ok() ? chosen->text() : chosen.error().message;
}

TEST(HostAddressTest, ReadsAndWrites) {
  EXPECT_EQ(address("10.0.0.1").text(), "10.0.0.1");
  EXPECT_EQ(address("[fd00::1]").text(), "fd00::1");
  EXPECT_TRUE(address("127.3.2.1").isLoopback());
  EXPECT_TRUE(address("::1").isLoopback());
  EXPECT_FALSE(address("::2").isLoopback());
  for (const char* wrong :
       {"", "host", "10.0.0", "10.0.0.1:80", "fe80::1", "fe80::1%eth0", "fd00::1%eth0", "[]"}) {
    const auto parsed = HostAddress::parse(wrong);
    ASSERT_FALSE(parsed.ok()) << wrong;
    EXPECT_EQ(parsed.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ((SocketAddress{address("fd00::1"), 80}.text()), "[fd00::1]:80");
}

TEST(HostAddressTest, TheWantedOneMustBeOurs) {
  EXPECT_EQ(choose(kHost, "192.168.5.1"), "192.168.5.1");
  EXPECT_EQ(choose(kHost, "[fd00::5]", address("10.0.0.5")), "fd00::5");
  const std::string error = choose(kHost, "10.9.9.9");
  EXPECT_NE(error.find("10.9.9.9"), std::string::npos);
  EXPECT_NE(error.find("192.168.5.1 (eth1)"), std::string::npos) << "names the choices";
}

TEST(HostAddressTest, TheWayToTheRendezvousWins) {
  EXPECT_EQ(choose(kHost, {}, address("192.168.5.1")), "192.168.5.1");
  EXPECT_EQ(choose(kHost, {}, address("127.0.0.1")), "127.0.0.1") << "everybody is on this host";
  EXPECT_EQ(choose(kHost, {}, address("8.8.8.8")), "10.0.0.5")
      << "not ours: as if there were no hint";
}

TEST(HostAddressTest, OtherwiseTheWayOut) {
  EXPECT_EQ(choose(kHost), "10.0.0.5");
  const std::vector<HostInterface> v6 = {kHost[1], kHost[2], kHost[4]};
  EXPECT_EQ(choose(v6), "fd00::5");
  const std::vector<HostInterface> unrouted = {kHost[0], kHost[2], kHost[3]};
  EXPECT_EQ(choose(unrouted), "192.168.5.1");
  const std::vector<HostInterface> bridged = {kHost[0], kHost[2]};
  EXPECT_EQ(choose(bridged), "172.17.0.1");
  const std::vector<HostInterface> alone = {kHost[1], kHost[0]};
  EXPECT_EQ(choose(alone), "::1");
  EXPECT_FALSE(chooseHostAddress({}, {}, {}).ok());
}

TEST(HostAddressTest, ThisHostHasAddressesThatCanBeListenedOn) {
  const auto interfaces = listInterfaces();
  ASSERT_TRUE(interfaces.ok());
  ASSERT_FALSE(interfaces->empty());
  const auto chosen = chooseHostAddress(*interfaces, {}, {});
  ASSERT_TRUE(chosen.ok());
  const auto listener = listenOn(*chosen);
  ASSERT_TRUE(listener.ok()) << listener.error().message;
  EXPECT_NE(listener->address.port, 0);
  const auto socket = beginConnect(listener->address);
  ASSERT_TRUE(socket.ok());
  EXPECT_TRUE(testing::eventually([&] { return outcomeOf(socket->get()) == 0; }));
}

TEST(HostAddressTest, TheKernelKnowsTheWay) {
  const auto loopback = addressTowards("127.0.0.1");
  ASSERT_TRUE(loopback.has_value());
  EXPECT_TRUE(loopback->isLoopback());
  EXPECT_FALSE(addressTowards("no such host").has_value());
}

}  // namespace
}  // namespace mooncake
