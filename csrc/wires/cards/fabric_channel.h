#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/contract/transport.h"
#include "wires/cards/card_fetches.h"
#include "wires/cards/card_mover.h"
#include "wires/cards/channel_life.h"
#include "wires/cards/control_receiver.h"
#include "wires/cards/message_parts.h"
#include "wires/cards/peer_cards.h"
#include "wires/cards/peer_keys.h"
#include "wires/cards/rails.h"
#include "wires/cards/retirements.h"
#include "wires/cards/simulated_breaks.h"
#include "wires/cards/warm_up.h"
#include "wires/packets/packet_stream.h"

namespace mooncake {

// One end of a channel over network cards, which keep no order and may lose data. A TCP channel
// below it carries messages, beats, the goodbye, and the control messages of the two ends. Puts,
// gets and writes go as packets (PacketStream), or cards move their bytes by themselves (CardMover,
// CardFetches). This class has the lock, the life of the channel, and the control messages.
//
// A path that fails says nothing about the peer, which is asked over TCP. If no path is up while
// the peer answers, the connection counts as broken, and the engine makes it again as it does with
// one of TCP. Transfers that were under way are lost then, and none begins before the connection
// stands again. Packets of the peer still arrive.
class FabricChannel final : public Channel,
                            public PacketSink,
                            public KeyHolder,
                            private control::Receiver,
                            public std::enable_shared_from_this<FabricChannel> {
 public:
  struct Options {
    const char* name = "fabric";
    // A transfer of at least this size goes over all rails. If fewer transfers than rails are under
    // way, a sixteenth of this is enough, because other transfers do not keep the rails busy.
    size_t splitBytes = size_t(2) << 20;
    // Least size of a transfer that cards move by themselves. A smaller one fits one packet.
    size_t leastByCard = size_t(16) << 10;
    // How long a path may have packets in flight without an acknowledgement before it has stalled.
    Clock::duration stallLimit = std::chrono::milliseconds(500);
    // How long every path may be down, while the peer is alive, before the connection breaks.
    Clock::duration pathLimit = std::chrono::seconds(2);
    // How long memory stays reserved for a fetch that the peer neither completes nor cancels. After
    // this the peer counts as stopped.
    Clock::duration servedLimit = std::chrono::seconds(10);
    // For tests: returns whether the connection is to break. Called at each transfer.
    std::function<bool()> breaks = nullptr;
  };
  // Without `memories` no card moves bytes by itself.
  FabricChannel(const TransportContext& context, std::shared_ptr<Rails> rails,
                std::shared_ptr<CardMemories> memories, const EngineId& peer, Options options);
  ~FabricChannel() override;

  const char* transportName() const override { return options_.name; }
  std::span<std::byte> peerArena() const override { return {}; }
  bool isMadeAgain() const override { return true; }
  uint64_t lifeSigns() const override;
  void beat() override { below_->beat(); }
  // Waits until each of our cards has reached the peer's or is left out, and one has. Also
  // exchanges the keys of `regions`, and of this side's long-lived regions.
  void warmUp(std::span<const RemoteRegion> regions, Deadline deadline,
              std::function<void(Status)> done) override;
  bool hasCards() const override { return memories_ != nullptr; }
  Status put(const PutRequest& request) override;
  using Channel::write;
  Status get(const GetRequest& request) override { return get(std::span(&request, 1)); }
  Status get(std::span<const GetRequest> requests) override;
  Status write(const WriteRequest& request) override { return write(request, {}); }
  Status write(const WriteRequest& request, const RemoteSignal& announcement) override;
  Status send(ByteView message) override;
  void cancel(const Completion* completion) override;
  uint64_t retire(const RemoteRegion& region) override;
  bool isRetired(uint64_t number) override;
  void beginFence() override;
  void fence() override;
  void flush() override;
  void close() override { end(/*isLeaving=*/true); }
  void abandon() override { end(/*isLeaving=*/false); }

  // Sets the channel below. Packets may arrive before, nothing leaves.
  void attach(std::shared_ptr<Channel> below);
  const std::shared_ptr<Channel>& below() const { return below_; }
  // Sends the bytes of a simulated card over the channel below. Any thread.
  Status carry(ByteView bytes) const;
  // Returns whether the channel is closed or the peer has left, so that it is not reconnected.
  bool isOver() const;

  // ---- the loop's thread
  // Takes a control message of the peer's end, of any kind but kCarried.
  void onControl(control::Kind kind, ByteView bytes);
  void onEnded(const Evidence& evidence);
  // The channel below was reconnected.
  void restart();
  // The same. `onPath` runs on the loop's thread, once: when a card has reached the peer again, or
  // at the deadline. A connection without a path would break again at once.
  void restart(Deadline deadline, std::function<void(Status)> onPath);
  // The engine knows that the connection was made again, so the packets that have come since land.
  // They are held until then: a thread that waits for data that the break has swallowed must hear
  // of the break before it sees later data.
  void resume();

  // ---- polling threads
  void onPacket(size_t rail, const Packet& packet, ByteView data) override;
  bool tick(Clock::time_point now) override;
  void onRenewed(size_t rail) override;
  // The ends of a piece, of a read of what a card has written, and of a packet that its card could
  // not send.
  void onMoved(const CardPiece& piece, bool hasBegun, const NicCompletion& how);
  void onReadBack(size_t path, bool hasBegun, const NicCompletion& how);
  void onSendFailed(size_t path, uint64_t epoch, const NicCompletion& how);
  RailShare& share() { return operations_; }
  RegisteredPool& pool() { return rails_->pool(); }

  void onKeysChanged(uint64_t region) override;

  // Number of packets that the peer has not acknowledged.
  size_t unacknowledged() const;
  // Number of bytes that cards have moved by themselves for this end.
  uint64_t moved() const NOT_CHECKED { return mover_.moved(); }  // which needs no lock

 private:
  // The work that beginFence() leaves to fence().
  struct Fencing {
    control::Fenced told;
    CardMover::Taken taken;
  };

  control::Tell teller();
  CardMover::Parts parts() NOT_CHECKED;  // for the constructor

  Status begin(Completion* completion) const REQUIRES(mutex_);
  void pump(Clock::time_point now) REQUIRES(mutex_);
  bool submit(size_t path, const std::shared_ptr<OutPacket>& packet) REQUIRES(mutex_);
  void activate() REQUIRES(mutex_);
  void apply(PacketStream::Effect effect, const Packet& packet, ByteView data) REQUIRES(mutex_);
  void finish(uint64_t transfer, ErrorCode code) REQUIRES(mutex_);
  void finishAll(ErrorCode code) REQUIRES(mutex_);
  void shutOut(const std::vector<uint64_t>& written) REQUIRES(mutex_);
  void lose(const Error& why) REQUIRES(mutex_);
  void breakOff(const std::string& why) REQUIRES(mutex_);
  void breakForTests() REQUIRES(mutex_);
  void endWait(const Status& how) REQUIRES(mutex_);
  void askCold(Clock::time_point now) REQUIRES(mutex_);
  void ask(Clock::time_point now) REQUIRES(mutex_);
  void tell(const Bytes& message) REQUIRES(mutex_);
  void flushPuts() REQUIRES(mutex_);
  void beginConnection() REQUIRES(mutex_);

  // Called without the lock.
  void retireWrites(const CardMover::Taken& taken) EXCLUDES(mutex_);
  void stop(const CardMover::Taken& taken) NOT_CHECKED;  // CardMover::release() needs no lock
  void end(bool isLeaving);
  void onMessage(ByteView message) override;
  void onMessageBegin(ByteView part) override;
  void onMessageEnd(ByteView part) override;
  void onHello(control::Hello hello) override;
  void onFenced(const control::Fenced& fenced) override;
  void onPacketMessage(const Packet& packet, ByteView data) override;
  void onAsk(uint64_t question) override;
  void onState(const control::State& state) override;
  void onResolve(uint64_t region) override;
  void onGrant(control::Grant grant) override;
  void onChanged(uint64_t region) override;
  void onCard(const control::Card& card) override;
  void onRetire(const control::Retire& retire) override;
  void onRetired(uint64_t ticket) override;
  void onFetch(const control::Fetch& fetch) override;
  void onFetched(const control::Fetched& fetched) override;
  void tellOfBreak(const std::string& why);

  const TransportContext& context_;
  const std::shared_ptr<Rails> rails_;
  const std::shared_ptr<CardMemories> memories_;
  const EngineId peer_;
  const Options options_;
  RailShare operations_;   // of this channel
  MessageParts messages_;  // has a lock of its own
  Mutex fenceMutex_;       // lets the second of two fences wait for the first
  std::atomic<uint64_t> received_{0};

  mutable Mutex mutex_;             // also held while bytes are placed
  std::shared_ptr<Channel> below_;  // constant after attach()
  ChannelLife life_ GUARDED_BY(mutex_);
  std::optional<Fencing> fencing_ GUARDED_BY(mutex_);      // between beginFence() and fence()
  bool isActive_ GUARDED_BY(mutex_) = false;               // ticks
  uint64_t epoch_ GUARDED_BY(mutex_) = 0;                  // number of restarts
  uint64_t incarnation_ GUARDED_BY(mutex_) = 0;            // ours, which packets for us bear
  std::function<void(Status)> onPath_ GUARDED_BY(mutex_);  // waits for a path, after restart()
  uint64_t question_ GUARDED_BY(mutex_) = 0;               // the last ASK
  Clock::time_point askedAt_ GUARDED_BY(mutex_);
  std::vector<control::Retire> heldRetires_ GUARDED_BY(mutex_);  // wait for resume()
  SimulatedBreaks breaks_ GUARDED_BY(mutex_);
  WarmUp warmUp_ GUARDED_BY(mutex_);
  PacketStream stream_ GUARDED_BY(mutex_);
  PeerCards cards_ GUARDED_BY(mutex_);
  PeerKeys keys_ GUARDED_BY(mutex_);
  Retirements retirements_ GUARDED_BY(mutex_);
  CardMover mover_ GUARDED_BY(mutex_);
  CardFetches fetches_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
