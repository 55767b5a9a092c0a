#pragma once

#include <algorithm>
#include <condition_variable>
#include <gtest/gtest.h>
#include <memory>
#include <mutex>
#include <poll.h>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/contract/transport.h"
#include "engine/memory/arena.h"
#include "engine/memory/region_table.h"
#include "wires/stream/handshake.h"

namespace mooncake::testing {

constexpr auto kPatience = std::chrono::seconds(20);

// Tests wait for conditions, never for a time.
template <typename Condition>
::testing::AssertionResult eventually(Condition&& condition,
                                      std::chrono::nanoseconds patience = kPatience) {
  const auto deadline = Deadline::after(patience);
  while (!condition()) {
    if (deadline.passed()) return ::testing::AssertionFailure() << "not in time";
    std::this_thread::yield();
  }
  return ::testing::AssertionSuccess();
}

inline Bytes bytesOf(std::string_view text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(data, data + text.size());
}

// Differs in every place and for every seed, so a shifted or swapped piece shows.
inline Bytes pattern(size_t bytes, uint64_t seed) {
  Bytes out(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    out[i] = static_cast<std::byte>(((i + seed * 977) * 0x9e3779b97f4a7c15ull) >> 56);
  }
  return out;
}

inline constexpr uint64_t stampOf(uint64_t number) { return number << 16 | 1; }

// Connects to one peer and blocks until the channel stands.
inline Result<std::shared_ptr<Channel>> connectNow(Transport& transport, const EngineId& peer,
                                                   ByteView endpoint, Deadline deadline) {
  auto connecting = transport.connect(peer, endpoint, deadline);
  if (!connecting.ok()) return connecting.error();
  for (std::vector<pollfd> sockets;; sockets.clear()) {
    auto channel = (*connecting)->advance();
    if (!channel.ok() || *channel) return channel;
    (*connecting)->addSockets(sockets);
    EXPECT_FALSE(sockets.empty()) << "nothing to wait for";
    ::poll(sockets.data(), sockets.size(), 10);
  }
}

inline Result<Handshaken> handshakeNow(Fd socket, const TransportContext& context,
                                       HandshakeConnector::Options options) {
  HandshakeConnector connector(std::move(socket), context, std::move(options));
  for (;;) {
    const auto done = connector.advance();
    if (!done.ok()) return done.error();
    if (*done) return connector.take();
    pollfd readable{.fd = connector.socket(), .events = POLLIN, .revents = 0};
    ::poll(&readable, 1, 10);
  }
}

// A part of a window as engines make it: in the arena, beginning with a doorbell, registered for
// remote reads and writes.
class Part {
 public:
  Part(Arena& arena, RegionTable& regions, size_t bytes,
       uint32_t rights = kRemoteRead | kRemoteWrite, Doorbell* bell = nullptr) {
    auto block = arena.allocate(bytes);
    EXPECT_TRUE(block.ok());
    block_ = std::move(*block);
    auto region = regions.add(block_.data(), bytes, rights, {}, bell);
    EXPECT_TRUE(region.ok());
    region_ = std::move(*region);
    bytes_ = bytes;
  }

  RemoteRegion remote() const { return region_.remote(); }
  std::span<std::byte> bytes() const { return {block_.data(), bytes_}; }
  std::span<std::byte> at(size_t offset, size_t length) const {
    return bytes().subspan(offset, length);
  }
  std::atomic<uint64_t>& word(size_t offset) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(block_.data() + offset);
  }
  Doorbell& bell() const { return *reinterpret_cast<Doorbell*>(block_.data()); }
  bool holds(size_t offset, ByteView expected) const {
    return std::equal(expected.begin(), expected.end(), block_.data() + offset);
  }
  bool isZero(size_t offset, size_t length) const {
    const auto range = at(offset, length);
    return std::all_of(range.begin(), range.end(), [](std::byte b) { return b == std::byte{0}; });
  }
  void revoke() { region_ = MemoryRegion(); }

 private:
  ArenaBlock block_;
  MemoryRegion region_;
  size_t bytes_ = 0;
};

// The parts of an engine that transports and connections need, and a record of their callbacks.
class EngineSide {
 public:
  explicit EngineSide(std::string_view key = "the job's key", EngineEnv env = {}) {
    auto arena = Arena::create(size_t(1) << 30);
    auto loop = EventLoop::start("test-io");
    auto crypto = Crypto::load();
    EXPECT_TRUE(arena.ok() && loop.ok() && crypto.ok());
    arena_ = std::move(*arena);
    auto life = arena_->allocate(sizeof(LifeWord));
    EXPECT_TRUE(life.ok());
    life_ = std::move(*life);
    new (life_.data()) LifeWord;  // held by no thread
    loop_ = std::move(*loop);
    const Nonce random = Crypto::randomNonce();
    EngineId id;
    std::copy_n(random.begin(), id.size(), id.begin());
    context_.reset(new TransportContext{
        .id = id,
        .env = std::move(env),
        .jobKey = bytesOf(key),
        .crypto = *crypto,
        .regions = regions_,
        .arena = *arena_,
        .life = life_.offset(),
        .loop = *loop_,
        .onAccepted =
            [this](EngineId peer, std::shared_ptr<Channel> channel) {
              std::lock_guard lock(mutex_);
              accepted_.emplace_back(peer, std::move(channel));
              changed_.notify_all();
            },
        .onMessage =
            [this](EngineId peer, ByteView message) {
              std::lock_guard lock(mutex_);
              messages_.emplace_back(peer, Bytes(message.begin(), message.end()));
              changed_.notify_all();
            },
        .onEnded =
            [this](EngineId peer, const Evidence& evidence) {
              std::lock_guard lock(mutex_);
              ended_.emplace_back(peer, evidence);
              changed_.notify_all();
            },
        .onReconnected =
            [this](EngineId) {
              std::lock_guard lock(mutex_);
              ++reconnected_;
              changed_.notify_all();
            },
    });
  }
  ~EngineSide() {
    for (auto& [peer, channel] : accepted_) channel->close();
  }

  const TransportContext& context() const { return *context_; }
  const EngineId& id() const { return context_->id; }
  RegionTable& regions() { return regions_; }
  EventLoop& loop() { return *loop_; }
  Part part(size_t bytes, uint32_t rights = kRemoteRead | kRemoteWrite, Doorbell* bell = nullptr) {
    return Part(*arena_, regions_, bytes, rights, bell);
  }

  // Returns the last channel that this peer connected; null if none came in time.
  std::shared_ptr<Channel> acceptedFrom(const EngineId& peer) {
    std::unique_lock lock(mutex_);
    std::shared_ptr<Channel> found;
    changed_.wait_for(lock, kPatience, [&] {
      for (auto& [from, channel] : accepted_) {
        if (from == peer) found = channel;
      }
      return found != nullptr;
    });
    return found;
  }
  void forgetAccepted() {
    std::lock_guard lock(mutex_);
    accepted_.clear();
  }
  size_t acceptedCount() {
    std::lock_guard lock(mutex_);
    return accepted_.size();
  }
  // Waits for the end of the peer's channel. Ok: it said goodbye. kTimeout: it did not end in time.
  Status endOf(const EngineId& peer) {
    std::unique_lock lock(mutex_);
    Status how(ErrorCode::kTimeout, "the channel did not end");
    changed_.wait_for(lock, kPatience, [&] {
      for (auto& [from, evidence] : ended_) {
        if (from == peer) {
          how = evidence.isGoodbye() ? Status() : Status(ErrorCode::kPeerLost, evidence.detail);
          return true;
        }
      }
      return false;
    });
    return how;
  }
  // Returns the first `count` messages of this peer; fewer if they did not come in time.
  std::vector<Bytes> messagesFrom(const EngineId& peer, size_t count) {
    std::unique_lock lock(mutex_);
    std::vector<Bytes> found;
    changed_.wait_for(lock, kPatience, [&] {
      found.clear();
      for (auto& [from, message] : messages_) {
        if (from == peer && found.size() < count) found.push_back(message);
      }
      return found.size() == count;
    });
    return found;
  }
  size_t renewedCount() {
    std::lock_guard lock(mutex_);
    return reconnected_;
  }
  size_t endedCount() {
    std::lock_guard lock(mutex_);
    return ended_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<EngineId, std::shared_ptr<Channel>>> accepted_;
  std::vector<std::pair<EngineId, Evidence>> ended_;
  std::vector<std::pair<EngineId, Bytes>> messages_;
  size_t reconnected_ = 0;
  std::unique_ptr<Arena> arena_;
  ArenaBlock life_;
  RegionTable regions_;
  std::unique_ptr<TransportContext> context_;
  std::unique_ptr<EventLoop> loop_;  // the first to go: its handlers use all of the above
};

}  // namespace mooncake::testing
