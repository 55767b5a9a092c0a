#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "wires/nic/nic.h"
#include "wires/nic/sim/sim_dice.h"

namespace mooncake {

// Odds of faults: a fault happens once in this number of cases; 0: never.
struct SimOdds {
  uint32_t failed = 1000;   // of operations: an error, and no byte arrives
  uint32_t late = 2000;     // an error, and all of it arrives afterwards
  uint32_t lateWrites = 0;  // of writes, besides
  uint32_t slowWrites = 0;  // of writes: parts of it arrive later, and it ends well behind them
  uint32_t lost = 2000;     // it arrives, its completion does not: the time limit ends it
  uint32_t storm = 300;     // of posts: no room, for a while
  uint32_t death = 20'000;  // the card does nothing for a while, and what comes to it is lost
  std::chrono::milliseconds lateness{20};  // at most
};

// A card that is worse than any real one: it has room for 128 operations, packets overtake each
// other, and faults happen by SimOdds. Its packets travel as messages that a carrier takes to the
// engine at the other end, so it works between processes.
class SimNic final : public Nic {
 public:
  static constexpr size_t kSlots = 128;
  // After this an operation ends if its completion was lost or its peer does not answer.
  static constexpr std::chrono::milliseconds kTimeLimit{30};
  static constexpr std::chrono::milliseconds kMostDeath{20};
  static constexpr std::chrono::microseconds kMostStorm{500};
  static constexpr std::chrono::milliseconds kLag{20};  // see Options::landsBehind

  using Host = std::array<std::byte, 16>;  // the engine that a card belongs to
  using Carry = std::function<Status(const Host& host, ByteView message)>;
  struct Options {
    Host host{};
    uint32_t index = 0;  // among the host's cards
    uint64_t seed = 0;
    SimOdds odds;
    Carry carry;
    std::function<void()> onGone = nullptr;
    bool withdrawalStops = true;
    bool closeEndsReads = true;
    // Returns whether bytes that cards write to this memory land behind the completion: when a card
    // reads through this one, or after kLag. Null: none do.
    std::function<bool(const std::byte* memory)> landsBehind = nullptr;
    uint64_t turn = 0;  // number of earlier cards at this index
  };
  explicit SimNic(Options options);
  ~SimNic() override;

  const std::string& name() const override { return name_; }
  const char* provider() const override { return "sim"; }
  const NicLimits& limits() const override { return limits_; }
  Bytes address() const override;
  Result<NicPeer> insert(ByteView address) override;
  void remove(NicPeer peer) override;
  Result<std::unique_ptr<NicMemory>> registerMemory(std::span<std::byte> memory,
                                                    uint32_t access) override;
  Status send(NicPeer peer, NicBuffer header, NicBuffer body, void* context) override;
  Status receive(NicBuffer buffer, void* context) override;
  Status read(NicPeer peer, NicBuffer target, NicKey from, uint64_t offset, void* context) override;
  Status write(NicPeer peer, NicBuffer source, NicKey to, uint64_t offset, void* context) override;
  size_t poll(std::span<NicCompletion> into) override;
  void wait(Deadline deadline) override;
  void wake() override;
  void close() override;

  // The carrier has brought a message. Any thread.
  void arrive(const Host& from, ByteView message);
  // Returns which card of a host a message is for.
  static std::optional<uint32_t> cardOf(ByteView message);

  // For tests: the card is dead until revive().
  void kill();
  void revive();
  uint64_t carried() const;  // messages that have left
  uint64_t refused() const;  // remote accesses with a wrong key, range or right

 private:
  class Memory;
  using Time = Clock::time_point;
  struct Address {
    Host host{};
    uint32_t index = 0;
    uint64_t life = 0;
    bool operator<(const Address& other) const {
      return std::tie(host, index, life) < std::tie(other.host, other.index, other.life);
    }
  };
  enum class Kind : uint8_t { kPacket = 1, kRead, kReadData, kWrite, kWritten };
  enum class Answer : uint8_t { kOk, kRefused };
  // Wire form, little-endian, in this order. `from` is sent without its host, which the carrier
  // knows.
  struct Message {
    Kind kind = Kind::kPacket;
    Answer answer = Answer::kOk;
    uint32_t to = 0;
    uint64_t toLife = 0;
    Address from;
    uint64_t operation = 0;
    uint64_t key = 0;
    uint64_t offset = 0;    // in the memory, of the whole
    uint64_t length = 0;    // of the whole
    uint64_t position = 0;  // of the data in it
    uint64_t micros = 0;    // it spends on the way
    Bytes encode(std::span<const std::byte> data) const;
    static std::optional<Message> decode(ByteReader& in);
  };
  // An operation under way. It has a slot until its completion is polled.
  struct Operation {
    NicCompletion::Kind kind = NicCompletion::Kind::kSent;
    NicPeer peer = 0;
    void* context = nullptr;
    std::span<std::byte> target;  // of a read
    uint64_t arrived = 0;
    uint64_t bytes = 0;
    Time deadline;
    bool hasEnded = false;  // its completion waits to be polled
    bool isAbandoned = false;
  };
  // Each of these is handled when its time has come.
  struct Out {
    Address to;
    Message message;
    std::span<const std::byte> header, body;  // read when it leaves
    Bytes owned;
    uint64_t sent = 0;  // the operation that ends when this has left; 0: none
    bool losesCompletion = false;
  };
  struct In {
    Host from;
    Bytes bytes;
  };
  struct Receive {
    NicBuffer buffer;
    void* context;
  };
  struct Registered {
    std::span<std::byte> memory;
    uint32_t access = 0;
    bool landsBehind = false;
  };
  // Bytes that are on their way from this card to memory.
  struct Landing {
    std::byte* to = nullptr;
    Bytes bytes;
  };

  Status begin(Operation operation, uint64_t& number, NicError& fate) REQUIRES(mutex_);
  void end(uint64_t number, NicError error, Time when) REQUIRES(mutex_);
  void die() REQUIRES(mutex_);
  bool isDead(Time now) const REQUIRES(mutex_) { return isKilled_ || now < deadUntil_; }
  void take(const In& in, Time now) REQUIRES(mutex_);
  bool deliver(ByteView packet, Time now) REQUIRES(mutex_);
  void serveRead(const Host& from, const Message& request, Time now) REQUIRES(mutex_);
  void serveWrite(const Host& from, const Message& piece, ByteView data, Time now) REQUIRES(mutex_);
  void reply(const Host& to, const Message& request, Message answer, ByteView data, Time when)
      REQUIRES(mutex_);
  std::optional<std::span<std::byte>> reach(const Message& message, uint32_t right,
                                            bool* landsBehind = nullptr) REQUIRES(mutex_);
  // Lands what was due at that time.
  void landUntil(Time when) REQUIRES(mutex_);
  void carryDue(Time now) EXCLUDES(mutex_);
  void cut(const Out& whole, std::span<const std::byte> data, Time now, bool isLate, bool isSlow)
      REQUIRES(mutex_);
  uint64_t drawLateness() REQUIRES(mutex_);
  Time nextDue() const REQUIRES(mutex_);

  const Options options_;
  const uint64_t life_;
  const std::string name_;
  NicLimits limits_;

  mutable Mutex mutex_;
  Condition due_;
  SimDice dice_ GUARDED_BY(mutex_);
  bool isWoken_ GUARDED_BY(mutex_) = false;
  bool isClosed_ GUARDED_BY(mutex_) = false;
  bool isKilled_ GUARDED_BY(mutex_) = false;
  Time deadUntil_ GUARDED_BY(mutex_);
  Time stormUntil_ GUARDED_BY(mutex_);
  std::vector<Address> peers_ GUARDED_BY(mutex_);
  std::map<Address, NicPeer> known_ GUARDED_BY(mutex_);
  uint64_t lastNumber_ GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Operation> operations_ GUARDED_BY(mutex_);
  std::multimap<Time, Out> out_ GUARDED_BY(mutex_);
  std::multimap<Time, In> in_ GUARDED_BY(mutex_);
  std::multimap<Time, NicCompletion> completions_ GUARDED_BY(mutex_);
  std::multimap<Time, std::pair<uint64_t, NicError>> ends_ GUARDED_BY(mutex_);
  std::deque<Receive> receives_ GUARDED_BY(mutex_);
  std::map<uint64_t, Registered> registered_ GUARDED_BY(mutex_);
  // With the end of their grace period.
  std::map<uint64_t, std::pair<Registered, Time>> withdrawn_ GUARDED_BY(mutex_);
  // Bytes that have arrived, per write.
  std::map<std::pair<Address, uint64_t>, uint64_t> writing_ GUARDED_BY(mutex_);
  std::multimap<Time, Landing> landings_ GUARDED_BY(mutex_);
  uint64_t carried_ GUARDED_BY(mutex_) = 0;
  uint64_t refused_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake
