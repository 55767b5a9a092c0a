#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/transports/sim/sim_dice.h"
#include "engine/transports/sim/sim_packet.h"
#include "engine/transports/transport.h"

namespace mooncake {

// One end of a simulated wire. Puts, gets and messages leave as packets, which the dice hold up and
// shuffle; only messages keep their order. What arrives is placed at once, piece by piece, and
// counted: a put is stamped, a get or a write has ended, when all of its bytes are there.
//
// A connection that breaks here stands underneath. What we had under way is lost, and nothing can
// be asked any more, until the engine has connected again; what the peer sends still arrives.
class SimChannel final : public Channel, public std::enable_shared_from_this<SimChannel> {
 public:
  struct Options {
    uint64_t seed = 0;
    uint32_t breakOdds = 0;  // it breaks once in so many transfers, at this end; 0: never
  };
  SimChannel(const TransportContext& context, const EngineId& peer, const Options& options)
      : context_(context), peer_(peer), options_(options), dice_(options.seed) {}
  ~SimChannel() override { close(); }

  const char* transportName() const override { return "sim"; }
  std::span<std::byte> peerArena() const override { return {}; }
  bool isMadeAgain() const override { return true; }
  uint64_t lifeSigns() const override { return below_->lifeSigns(); }
  void beat() override { below_->beat(); }
  Status put(const PutRequest& request) override;
  using Channel::get;
  using Channel::write;
  Status get(const GetRequest& request) override;
  Status write(const WriteRequest& request) override;
  Status send(ByteView message) override;
  void cancel(const Completion* completion) override;
  void fence() override;
  void close() override;

  // The channel underneath. Packets may come before, nothing leaves.
  void attach(std::shared_ptr<Channel> below);
  const std::shared_ptr<Channel>& below() const { return below_; }
  // Closed, or the peer has left: nothing to connect again for.
  bool isOver() const;

  // On the loop's thread.
  void onPacket(ByteView bytes);
  void onEnded(const Evidence& evidence);
  // The channel underneath was reconnected.
  void restart();

 private:
  using Kind = SimPacket::Kind;
  // What has yet to happen. Without a packet: the end of transfer `finished`, whose data has come.
  struct Held {
    std::optional<SimPacket> packet;
    Bytes data;          // of puts, writes and messages
    uint64_t bytes = 0;  // of an answer: read when it leaves
    uint64_t finished = 0;
  };
  struct Put {
    uint64_t arrived = 0;
    bool isDropped = false;  // late, or refused
  };
  struct Write {
    uint64_t arrived = 0;
    SimPacket::Status status = SimPacket::Status::kOk;
  };
  struct Transfer {
    std::span<std::byte> target;  // of a get
    Completion* completion = nullptr;
    uint64_t arrived = 0;
  };

  // All under the lock.
  Status usable() const;
  void hold(Held held, Clock::time_point when);
  void release();
  Status let(Held& held);
  void wakeAt(Clock::time_point when);
  void land(const SimPacket& piece, ByteView data);
  bool place(const SimPacket& piece, ByteView data);
  void landWrite(const SimPacket& piece, ByteView data);
  void answer(const SimPacket& get);
  void take(const SimPacket& answer, ByteView data);
  std::optional<Bytes> gather(const SimPacket& piece, ByteView data);
  void finish(uint64_t transfer, ErrorCode code);
  void finishAll(ErrorCode code);
  void lose(const Error& why);
  void perhapsBreak();

  void onTimer(Clock::time_point when);
  void tellOfBreak();

  const TransportContext& context_;
  const EngineId peer_;
  const Options options_;

  mutable std::mutex mutex_;        // guards what follows; also while bytes are placed
  std::shared_ptr<Channel> below_;  // constant once it is attached
  SimDice dice_;
  std::optional<Error> lost_;  // until restart()
  bool hasLeft_ = false;       // the peer, in peace
  bool closed_ = false;
  bool fenced_ = false;
  Clock::time_point standsUntil_;  // at least
  uint64_t heard_ = 0;             // when it was made again

  std::multimap<Clock::time_point, Held> held_;  // by when it is due
  Clock::time_point lastMessage_;                // due not before
  std::map<std::pair<uint64_t, uint64_t>, Clock::time_point>
      lastPuts_;  // likewise, by key and word
  Clock::time_point wakesAt_ = Clock::time_point::max();
  uint64_t lastNumber_ = 0;
  std::map<uint64_t, Put> puts_;            // of the peer
  std::map<uint64_t, Write> writes_;        // of the peer
  std::map<uint64_t, Transfer> transfers_;  // ours
  Bytes arriving_;                          // of a message
  bool loggedRefusal_ = false;
};

}  // namespace mooncake
