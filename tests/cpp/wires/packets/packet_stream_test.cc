// Two streams on a simulated network that drops, repeats and reorders packets, by seed. Time is
// simulated, too. MOONCAKE_TEST_SCENARIOS is the number of seeds, MOONCAKE_TEST_SEED the first one.
#include "wires/packets/packet_stream.h"

#include <array>
#include <cstdlib>
#include <deque>
#include <random>

#include "engine_side.h"

namespace mooncake::testing {
namespace {

using Code = ErrorCode;

constexpr size_t kPaths = 3;
constexpr size_t kPacketBytes = 1024;
constexpr size_t kBuffers = PacketPool::kReserve + 2000;  // more than both windows
constexpr auto kStallLimit = std::chrono::milliseconds(20);
constexpr size_t kWordsAt = 64, kWords = 4;
constexpr size_t kRangesAt = 4096, kEach = 8192, kRanges = 120;
constexpr size_t kPartBytes = kRangesAt + kRanges * kEach;

uint64_t numberIn(const char* text, uint64_t otherwise) {
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::unique_ptr<PacketPool> makePool(size_t buffers = kBuffers) {
  auto pool = PacketPool::create(buffers, kPacketBytes);
  EXPECT_TRUE(pool.ok());
  return std::move(*pool);
}

PacketStream::Options optionsOf(size_t paths) {
  PacketStream::Options options{
      .pathNames = {}, .packetBytes = kPacketBytes, .splitBytes = 4096, .stallLimit = kStallLimit};
  for (size_t i = 0; i < paths; ++i) options.pathNames.push_back("path" + std::to_string(i));
  return options;
}

// Returns how many buffers a share takes that has just been made.
size_t freeBuffers(PacketPool& pool) {
  PacketPool::Share share(pool);
  std::vector<PacketPool::Buffer> taken;
  for (auto buffer = pool.take(share); buffer.at; buffer = pool.take(share))
    taken.push_back(buffer);
  for (const auto& buffer : taken) pool.giveBack(share, buffer);
  return taken.size();
}

// One end: a stream, and memory that its peer reaches.
struct End {
  explicit End(PacketPool& pool, size_t paths = kPaths)
      : part(side.part(kPartBytes)), stream(optionsOf(paths), side.regions(), pool) {}

  EngineSide side;
  Part part;
  Doorbell bell;
  PacketStream stream;
  uint64_t incarnation = 0;
};

struct Faults {
  uint32_t drops = 0, repeats = 0;  // of 1000 packets
  bool failsPaths = false;          // paths go down and come back
};

// The network between two ends. Plays the part of both channels.
class Network {
 public:
  Network(End& a, End& b, uint64_t seed, Faults faults) : ends_{&a, &b}, faults_(faults) {
    random_.seed(seed);
    for (size_t i = 0; i < 2; ++i) {
      ends_[i]->incarnation = 100 * seed + i;
      ends_[i]->stream.open(100 * seed + 1 - i, kPacketBytes);
    }
  }

  uint64_t below(uint64_t end) { return random_() % end; }
  Clock::time_point now() const { return now_; }
  size_t inFlight() const { return packets_.size(); }

  void pump(End& from) {
    const size_t to = &from == ends_[0] ? 1 : 0;
    const auto submit = [&](size_t path, const std::shared_ptr<OutPacket>& packet) {
      const auto bytes = packet->bytes();
      packets_.push_back({to, path, Bytes(bytes.begin(), bytes.end())});
      return true;
    };
    if (from.stream.isOpen()) from.stream.sendPlain(submit);
    if (from.stream.isOpen()) from.stream.send(now_, submit);
    EXPECT_LE(from.stream.unacknowledged(), PacketStream::kWindow * kPaths);
  }

  // One packet arrives, or is lost; every 20 steps both ends tick. Returns the end that has got
  // something, or null.
  End* step() {
    now_ += std::chrono::microseconds(50);
    if (++steps_ % 20 == 0) tick();
    if (packets_.empty()) return nullptr;
    const size_t index = below(std::min<size_t>(packets_.size(), 64));
    const auto at = packets_.begin() + static_cast<ptrdiff_t>(index);
    InFlight packet = *at;
    if (below(1000) >= faults_.repeats) packets_.erase(at);
    if (below(1000) < faults_.drops || isDown_[packet.path]) return nullptr;
    End& end = *ends_[packet.to];
    receive(end, packet);
    pump(end);
    return &end;
  }

  // Until nothing is in flight and nothing waits. `look` is called after each packet.
  template <typename Look>
  bool settle(const Look& look) {
    isEnding_ = true;
    for (size_t i = 0; i < 2'000'000; ++i) {
      if (End* end = step()) look(*end);
      if (packets_.empty() && !ends_[0]->stream.isBusy() && !ends_[1]->stream.isBusy()) return true;
    }
    return false;
  }
  bool settle() {
    return settle([](End&) {});
  }

 private:
  struct InFlight {
    size_t to = 0;
    size_t path = 0;
    Bytes bytes;
  };

  void receive(End& end, const InFlight& packet) {
    ByteReader in(packet.bytes);
    const auto read = Packet::decode(in);
    ASSERT_TRUE(read.ok());
    if (read->incarnation != end.incarnation) return;
    const auto effect = end.stream.receive(packet.path, *read, in.getRaw(in.left()), now_);
    if (effect.end) end.stream.finish(effect.end->transfer, effect.end->code);
  }

  // As the channel asks over TCP when nothing has come through for a while.
  void tick() {
    if (faults_.failsPaths && below(40) == 0) isDown_[below(kPaths)] = !isEnding_ && below(2) == 0;
    if (isEnding_) isDown_ = {};
    for (size_t i = 0; i < 2; ++i) {
      PacketStream& stream = ends_[i]->stream;
      if (!stream.isOpen()) continue;
      if (!stream.paths().stalled(now_).empty()) {
        const Serials& come = ends_[1 - i]->stream.serials();
        stream.acknowledge(come.below(), {come.above().begin(), come.above().end()}, now_);
        for (const size_t path : stream.paths().stalled(now_))
          stream.leaveOut(path, now_, "nothing comes through");
      }
      stream.tick(now_);
      pump(*ends_[i]);
    }
  }

  const std::array<End*, 2> ends_;
  const Faults faults_;
  std::mt19937_64 random_;
  std::deque<InFlight> packets_;
  std::array<bool, kPaths> isDown_{};
  bool isEnding_ = false;
  Clock::time_point now_ = Clock::now();
  uint64_t steps_ = 0;
};

// Puts of one end to words of the other. Each put has a range of its own. When its stamp is there,
// the range must hold all of it, and is overwritten: a second landing would show.
class Puts {
 public:
  Puts(End& from, End& to) : from_(from), to_(to) {}

  void put(Network& network, size_t bytes) {
    const size_t word = network.below(kWords), range = next_++;
    const uint64_t stamp = ++last_[word];
    puts_[word].push_back({range, bytes});
    Bytes data = pattern(bytes, range);
    const uint64_t number = from_.stream.put({.region = to_.part.remote(),
                                              .offset = kRangesAt + range * kEach,
                                              .data = data,
                                              .signal = {kWordsAt + 8 * word, stamp}});
    network.pump(from_);
    from_.stream.copyUnsent(number);
    std::ranges::fill(data, std::byte{0x55});  // the caller reuses it
  }
  bool hasRoom() const { return next_ < kRanges / 2; }

  void look(End& end) {
    if (&end != &to_) return;
    for (size_t word = 0; word < kWords; ++word) {
      const uint64_t stamp = to_.part.word(kWordsAt + 8 * word).load();
      ASSERT_GE(stamp, seen_[word]);
      for (; seen_[word] < stamp; ++seen_[word]) {
        const auto [range, bytes] = puts_[word][seen_[word]];
        const size_t at = kRangesAt + range * kEach;
        ASSERT_TRUE(to_.part.holds(at, pattern(bytes, range))) << "range " << range;
        std::ranges::fill(to_.part.at(at, bytes), std::byte{0xee});
      }
    }
  }
  void expectAll() const {
    EXPECT_EQ(seen_, last_);
    for (const auto& ofWord : puts_) {
      for (const auto& [range, bytes] : ofWord) {
        const auto at = to_.part.at(kRangesAt + range * kEach, bytes);
        EXPECT_TRUE(std::ranges::all_of(at, [](std::byte b) { return b == std::byte{0xee}; }))
            << "range " << range << " has landed twice";
      }
    }
  }

 private:
  struct Put {
    size_t range = 0, bytes = 0;
  };
  End& from_;
  End& to_;
  size_t next_ = 0;
  std::array<std::vector<Put>, kWords> puts_;
  std::array<uint64_t, kWords> last_{}, seen_{};
};

// Gets and writes of one end, in the upper half of the other's ranges.
class Transfers {
 public:
  Transfers(End& from, End& to) : from_(from), to_(to), completion_(&from.bell) {}

  bool hasRoom() const { return next_ < kRanges / 2; }
  void begin(Network& network, size_t bytes) {
    const size_t range = kRanges / 2 + next_++;
    const size_t offset = kRangesAt + range * kEach;
    const bool isWrite = network.below(2) == 0;
    const Bytes data = pattern(bytes, 1000 + range);
    One& one = ones_.emplace_back(One{range, isWrite, isWrite ? data : Bytes(bytes)});
    completion_.begin();
    if (isWrite) {
      // Announced by a word of its own, behind those of the puts.
      from_.stream.write(
          {to_.part.remote().key, offset}, one.memory,
          {.completion = &completion_, .announcement = {to_.part.remote(), {wordOf(range), 1}}});
    } else {
      std::ranges::copy(data, to_.part.at(offset, bytes).begin());
      from_.stream.get({to_.part.remote().key, offset},
                       {.target = one.memory, .completion = &completion_});
    }
    network.pump(from_);
  }
  void expectAll() const {
    EXPECT_TRUE(completion_.finished());
    EXPECT_EQ(completion_.error.load(), Code::kOk);
    EXPECT_EQ(from_.stream.transfers(), 0u);
    for (const One& one : ones_) {
      const Bytes expected = pattern(one.memory.size(), 1000 + one.range);
      EXPECT_EQ(one.memory, expected);
      EXPECT_TRUE(to_.part.holds(kRangesAt + one.range * kEach, expected));
      EXPECT_EQ(to_.part.word(wordOf(one.range)).load(), one.isWrite ? 1u : 0u);
    }
  }

 private:
  struct One {
    size_t range = 0;
    bool isWrite = false;
    Bytes memory;
  };
  static size_t wordOf(size_t range) { return kWordsAt + 8 * (kWords + range); }

  End& from_;
  End& to_;
  Completion completion_;
  size_t next_ = 0;
  std::deque<One> ones_;
};

void runScenario(uint64_t seed) {
  const auto pool = makePool();
  End a(*pool), b(*pool);
  std::mt19937_64 random(seed);
  const Faults faults{.drops = static_cast<uint32_t>(random() % 3 == 0 ? 0 : random() % 150),
                      .repeats = static_cast<uint32_t>(random() % 200),
                      .failsPaths = random() % 2 == 0};
  const size_t before = freeBuffers(*pool);
  Network network(a, b, seed, faults);
  Puts putsOfA(a, b), putsOfB(b, a);
  Transfers transfersOfA(a, b), transfersOfB(b, a);
  const auto look = [&](End& end) {
    putsOfA.look(end);
    putsOfB.look(end);
  };
  while (putsOfA.hasRoom() || putsOfB.hasRoom() || transfersOfA.hasRoom() ||
         transfersOfB.hasRoom()) {
    const size_t bytes = 1 + network.below(network.below(4) == 0 ? kEach : 900);
    switch (network.below(4)) {
      case 0:
        if (putsOfA.hasRoom()) putsOfA.put(network, bytes);
        break;
      case 1:
        if (putsOfB.hasRoom()) putsOfB.put(network, bytes);
        break;
      case 2:
        if (transfersOfA.hasRoom()) transfersOfA.begin(network, bytes);
        break;
      default:
        if (transfersOfB.hasRoom()) transfersOfB.begin(network, bytes);
    }
    for (uint64_t steps = network.below(12); steps > 0; --steps) {
      if (End* end = network.step()) look(*end);
    }
  }
  ASSERT_TRUE(network.settle(look)) << "something stays under way";
  for (const Puts* puts : {&putsOfA, &putsOfB}) puts->expectAll();
  for (const Transfers* transfers : {&transfersOfA, &transfersOfB}) transfers->expectAll();
  EXPECT_EQ(a.stream.unacknowledged() + b.stream.unacknowledged(), 0u);
  EXPECT_EQ(freeBuffers(*pool), before);
}

TEST(PacketStream, EverythingLandsOnceAndInTheOrderOfItsWord) {
  const uint64_t first = numberIn(std::getenv("MOONCAKE_TEST_SEED"), 1);
  const uint64_t count = numberIn(std::getenv("MOONCAKE_TEST_SCENARIOS"), 40);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    runScenario(seed);
    if (::testing::Test::HasFailure()) return;
  }
}

class PacketStreamTest : public ::testing::Test {
 protected:
  // Requests of all kinds, each of which needs many packets.
  void requestAll() {
    const auto number = a.stream.put(put(data, 1));
    network.pump(a);
    a.stream.copyUnsent(number);
    for (int i = 0; i < 3; ++i) completion.begin();
    a.stream.get({b.part.remote().key, kRangesAt}, {.target = target, .completion = &completion});
    a.stream.write({b.part.remote().key, kRangesAt + 3 * kEach}, data, {.completion = &completion});
    a.stream.write({b.part.remote().key, kRangesAt}, data, {.completion = &completion});
    network.pump(a);
  }
  PutRequest put(ByteView bytes, uint64_t stamp) {
    return {.region = b.part.remote(),
            .offset = kRangesAt + 2 * kEach,
            .data = bytes,
            .signal = {kWordsAt, stamp}};
  }
  uint64_t word() const { return b.part.word(kWordsAt).load(); }

  std::unique_ptr<PacketPool> pool = makePool();
  End a{*pool}, b{*pool};
  const size_t before = freeBuffers(*pool);
  Network network{a, b, 1, {}};
  Completion completion{&a.bell};
  const Bytes data = pattern(40 * kPacketBytes, 1);
  Bytes target = Bytes(data.size());
};

TEST_F(PacketStreamTest, WindowHoldsUntilThePeerAcknowledges) {
  const Bytes much = pattern(2 * PacketStream::kWindow * kPaths * kPacketBytes, 1);
  a.stream.put(put(much, 1));
  network.pump(a);
  const size_t inFlight = a.stream.unacknowledged();
  EXPECT_EQ(inFlight, PacketStream::kWindow * kPaths);
  network.pump(a);
  EXPECT_EQ(a.stream.unacknowledged(), inFlight) << "nothing more before an acknowledgement";
  EXPECT_TRUE(network.settle());
  EXPECT_EQ(word(), 1u);
}

TEST_F(PacketStreamTest, PeersThatAcknowledgeNothingLeaveBuffersToOthers) {
  constexpr size_t kFew = 200;
  const auto few = makePool(PacketPool::kReserve + kFew);
  End from(*few), to(*few);
  std::deque<End> silent;
  const Bytes much(2 * kFew * kPacketBytes);
  size_t held = 0;
  for (int i = 0; i < 6; ++i) silent.emplace_back(*few).stream.open(7, kPacketBytes);
  for (End& end : silent) {
    PacketStream& stream = end.stream;
    stream.put(put(much, 1));
    stream.send(network.now(), [](size_t, const auto&) { return true; });
    EXPECT_GT(stream.unacknowledged(), 0u);
    held += stream.unacknowledged();
  }
  EXPECT_LT(held, kFew);
  Network other(from, to, 3, {});
  const auto number = from.stream.put(
      {.region = to.part.remote(), .offset = kRangesAt, .data = data, .signal = {kWordsAt, 1}});
  other.pump(from);
  from.stream.copyUnsent(number);
  EXPECT_TRUE(other.settle());
  EXPECT_TRUE(to.part.holds(kRangesAt, data));
}

TEST_F(PacketStreamTest, PacketsOfAPathThatFailsLeaveOverTheOthers) {
  const auto number = a.stream.put(put(data, 1));
  std::array<size_t, kPaths> counts{};
  const auto count = [&](size_t path, const auto&) {
    ++counts[path];
    return path != 1;  // leads nowhere
  };
  a.stream.send(network.now(), count);
  a.stream.copyUnsent(number);
  EXPECT_EQ(counts[1], 1u);
  EXPECT_FALSE(a.stream.paths().isUp(1));
  const size_t first = counts[0] + counts[2];
  a.stream.send(network.now(), count);
  EXPECT_EQ(counts[0] + counts[2], first + 1) << "only the packet of that path leaves again";
  EXPECT_EQ(counts[1], 1u);
}

TEST_F(PacketStreamTest, APacketThatIsLostAloneLeavesAgainThoughItsPathIsBusy) {
  End busy(*pool, 1), peer(*pool, 1);
  Network path(busy, peer, 2, {});
  const auto put = [&](size_t word) {
    busy.stream.put({.region = peer.part.remote(),
                     .offset = kRangesAt,
                     .data = {},
                     .signal = {kWordsAt + 8 * word, 1}});
  };
  put(0);
  busy.stream.send(path.now(), [](size_t, const auto&) { return true; });  // it is lost
  const auto landed = [&] { return peer.part.word(kWordsAt).load() == 1; };
  for (int i = 0; i < 1000 && !landed(); ++i) {
    put(1);
    path.pump(busy);
    for (int step = 0; step < 20; ++step) path.step();
    ASSERT_TRUE(busy.stream.paths().isUp(0));
  }
  EXPECT_TRUE(landed());
}

TEST_F(PacketStreamTest, AFencedPeerFreesEverything) {
  requestAll();
  a.stream.fence(network.now());
  a.stream.finishAll(Code::kAborted);
  EXPECT_TRUE(completion.finished());
  EXPECT_EQ(completion.error.load(), Code::kAborted);
  EXPECT_EQ(a.stream.unacknowledged(), 0u);
  EXPECT_EQ(freeBuffers(*pool), before);
  // Nothing of the peer counts from now on.
  b.stream.put({.region = a.part.remote(), .offset = kRangesAt, .data = data, .signal = {64, 1}});
  for (int i = 0; i < 100; ++i) {
    network.pump(b);
    network.step();
  }
  EXPECT_EQ(a.part.word(64).load(), 0u);
  EXPECT_TRUE(a.part.isZero(kRangesAt, data.size()));
}

TEST_F(PacketStreamTest, AFenceNamesTheWritesThatHaveLanded) {
  completion.begin();
  a.stream.write({b.part.remote().key, kRangesAt}, data, {.completion = &completion});
  network.pump(a);
  const auto hasLanded = [&] { return b.part.holds(kRangesAt, data); };
  for (int i = 0; i < 1000 && !hasLanded(); ++i) network.step();
  ASSERT_TRUE(hasLanded());
  ASSERT_FALSE(completion.finished());
  const auto landed = b.stream.fence(network.now());
  ASSERT_EQ(landed.size(), 1u);
  a.stream.finish(landed[0], Code::kOk);
  a.stream.shutOut(network.now());
  EXPECT_TRUE(a.stream.finishAll(Code::kAborted).empty());
  EXPECT_TRUE(completion.finished());
  EXPECT_EQ(completion.error.load(), Code::kOk);
  EXPECT_EQ(freeBuffers(*pool), before);
}

TEST_F(PacketStreamTest, AClosedStreamFreesEverything) {
  requestAll();
  a.stream.finishAll(Code::kAborted);
  size_t told = 0;
  a.stream.flushPuts([&](ByteView bytes) {
    ByteReader in(bytes);
    const auto packet = Packet::decode(in);
    ASSERT_TRUE(packet.ok());
    b.stream.receivePut(*packet, in.getRaw(in.left()));
    ++told;
  });
  a.stream.close();
  EXPECT_EQ(told, (data.size() - 1) / (kPacketBytes - Packet::kBytes) + 1);
  EXPECT_EQ(word(), 1u) << "a put before the end arrives";
  EXPECT_TRUE(completion.finished());
  EXPECT_EQ(freeBuffers(*pool), before);
}

TEST_F(PacketStreamTest, AnotherConnectionBeginsAnew) {
  requestAll();
  for (int i = 0; i < 30; ++i) network.step();
  for (End* end : {&a, &b}) {
    end->stream.breakOff();
    end->stream.finishAll(Code::kPeerLost);
    end->stream.restart();
    EXPECT_EQ(end->stream.unacknowledged(), 0u);
  }
  EXPECT_TRUE(completion.finished());
  EXPECT_EQ(completion.error.load(), Code::kPeerLost);
  EXPECT_EQ(freeBuffers(*pool), before);
  const Bytes other = pattern(3 * kPacketBytes, 2);
  Network again(a, b, 2, {});
  const auto number = a.stream.put(put(other, 5));
  again.pump(a);
  a.stream.copyUnsent(number);
  for (int i = 0; i < 200; ++i) again.step();
  EXPECT_EQ(word(), 0u) << "held until release()";
  for (const auto& [packet, bytes] : b.stream.release()) b.stream.land(packet, bytes);
  EXPECT_TRUE(again.settle());
  EXPECT_EQ(word(), 5u);
  EXPECT_TRUE(b.part.holds(kRangesAt + 2 * kEach, other));
}

TEST_F(PacketStreamTest, ACancelledTransferTouchesItsMemoryNoMore) {
  Bytes source = data;
  Completion other(&a.bell);
  other.begin();
  completion.begin();
  completion.begin();
  a.stream.write({b.part.remote().key, kRangesAt}, source, {.completion = &completion});
  a.stream.get({b.part.remote().key, kRangesAt}, {.target = target, .completion = &completion});
  a.stream.get({b.part.remote().key, kRangesAt + 50 * kEach},
               {.target = std::span(target).first(100), .completion = &other});
  for (int i = 0; i < 10; ++i) {
    network.pump(a);
    network.step();
  }
  a.stream.cancel(&completion);
  EXPECT_TRUE(completion.finished());
  EXPECT_EQ(completion.error.load(), Code::kAborted);
  source = Bytes();
  const Bytes seen = target;
  EXPECT_TRUE(network.settle());
  EXPECT_TRUE(std::equal(seen.begin() + 100, seen.end(), target.begin() + 100));
  EXPECT_TRUE(other.finished());
  EXPECT_EQ(other.error.load(), Code::kOk);
  EXPECT_EQ(a.stream.transfers(), 0u);
}

TEST_F(PacketStreamTest, AnAnswerToAnUnknownGetIsLeftToTheCaller) {
  std::ranges::copy(data, b.part.at(kRangesAt, data.size()).begin());
  const uint64_t number = a.stream.nextNumber();
  const Packet answer{.kind = Packet::Kind::kAnswer,
                      .incarnation = a.incarnation,
                      .serial = 1,
                      .number = number,
                      .length = 100};
  const auto bytes = ByteView(data).first(100);
  EXPECT_TRUE(a.stream.receive(0, answer, bytes, network.now()).isUnexpected);
  a.stream.expectAnswer(number, {.target = std::span(target).first(100), .whole = 9});
  const auto effect = a.stream.land(answer, bytes);
  ASSERT_TRUE(effect.end.has_value());
  const auto part = a.stream.finish(effect.end->transfer, effect.end->code);
  ASSERT_TRUE(part.has_value());
  EXPECT_EQ(part->whole, 9u);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), target.begin()));
}

}  // namespace
}  // namespace mooncake::testing
