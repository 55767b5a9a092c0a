#pragma once

#include <future>

#include "engine_side.h"

// Shared by the tests of one wire: engines with that wire only, and channels between two of them.
namespace mooncake::testing {

constexpr size_t kWord = 64;   // offset of the tests' stamps
constexpr size_t kData = 128;  // offset of their data

inline EngineEnv onLoopback() {
  EngineEnv env;
  env.hostIp = "127.0.0.1";
  return env;
}

struct WireEnd : EngineSide {
  template <typename Create>
  WireEnd(EngineEnv env, Create create, std::string_view key = "the job's key")
      : EngineSide(key, std::move(env)) {
    auto created = create(context());
    if (!created.ok()) ADD_FAILURE() << created.error().message;
    transport = std::move(*created);
  }
  ~WireEnd() {
    transport->shutdown();
    loop().stop();
  }
  std::unique_ptr<Transport> transport;
};

inline Result<std::shared_ptr<Channel>> connectNow(const WireEnd& from, const WireEnd& to) {
  return connectNow(*from.transport, to.id(), to.transport->endpoint(), Deadline::after(kPatience));
}

// Waits for the transfers that count at this completion, and returns how they ended.
inline ErrorCode endOf(const Completion& completion) {
  EXPECT_TRUE(eventually([&] { return completion.finished(); }));
  return completion.error.load();
}

// Makes a put that must arrive. On wires that keep order, all earlier puts have been handled then.
// On other wires, a test that an earlier put wrote nothing may miss a late write.
inline void expectPutArrives(Channel& channel, const Part& part, uint64_t number,
                             size_t bytes = 100) {
  const Bytes data = pattern(bytes, number);
  ASSERT_TRUE(channel.put({part.remote(), kData, data, {kWord, stampOf(number)}}).ok());
  ASSERT_TRUE(eventually([&] { return part.word(kWord).load() == stampOf(number); }));
  EXPECT_TRUE(part.holds(kData, data));
}

// A test in which a has connected to b.
class ConnectedTest : public ::testing::Test {
 protected:
  void connect(const WireEnd& a, WireEnd& b) {
    auto connected = connectNow(a, b);
    ASSERT_TRUE(connected.ok()) << connected.error().message;
    toB = std::move(*connected);
    toA = b.acceptedFrom(a.id());
    ASSERT_NE(toA, nullptr);
  }
  // Makes the connection of toB again.
  Status reconnect(WireEnd& a, const WireEnd& b, std::chrono::milliseconds patience = kPatience) {
    std::promise<Status> done;
    a.loop().post([&] {
      a.transport->reconnect(b.id(), toB, b.transport->endpoint(), Deadline::after(patience),
                             [&](Status how) { done.set_value(std::move(how)); });
    });
    return done.get_future().get();
  }
  void TearDown() override {
    for (auto* channel : {&toB, &toA}) {
      if (*channel) (*channel)->close();
      channel->reset();  // before the WireEnds
    }
  }

  // Outlives the channels: they may still use it when a completion has just finished.
  Doorbell bell;
  std::shared_ptr<Channel> toB, toA;
};

}  // namespace mooncake::testing
