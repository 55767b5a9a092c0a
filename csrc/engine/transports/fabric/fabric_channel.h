#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "engine/contract/transport.h"
#include "engine/packets/packet_stream.h"
#include "engine/transports/fabric/card_transfer.h"
#include "engine/transports/fabric/control.h"
#include "engine/transports/fabric/rails.h"
#include "engine/transports/fabric/warm_up.h"

namespace mooncake {

// One end of a channel over cards that keep no order and lose what they please. Beneath it stands a
// TCP channel: messages, beats and the goodbye travel there, and what the two ends have to tell
// each other about the cards. Puts, gets and writes leave as packets over any card (rail) that
// leads to the peer at the moment; each is numbered and kept until the peer has acknowledged it, so
// whatever becomes of a card, what was on it leaves again over another one.
//
// A path that fails is not the peer: that is asked over TCP. When no path leads there any more
// while it answers, the connection counts as broken, and the engine makes it again as it would
// one of TCP's own. What was under way is lost then, and nothing can be asked any more until it
// stands; what the peer sends still arrives.
class FabricChannel final : public Channel,
                            public PacketSink,
                            public KeyHolder,
                            public std::enable_shared_from_this<FabricChannel> {
 public:
  struct Options {
    const char* name = "fabric";
    // A transfer of so many goes over all rails; where fewer are under way at a time than there are
    // rails, one of a sixteenth of that: nobody else would keep them busy.
    size_t splitBytes = size_t(2) << 20;
    size_t leastByCard = size_t(16)
                         << 10;  // that a card moves by itself: packets do with one piece
    // Of a path on which something is under way and nothing comes to its end.
    Clock::duration stallLimit = std::chrono::milliseconds(500);
    // Of all paths, none of which is up while the peer lives.
    Clock::duration pathLimit = std::chrono::seconds(2);
    // Of what the peer has asked for, and whose memory here is not free meanwhile, while it neither
    // takes it nor says that nothing of it can come late: it has stopped.
    Clock::duration servedLimit = std::chrono::seconds(10);
    // For tests: whether the connection breaks, asked at each transfer.
    std::function<bool()> breaks = nullptr;
  };
  // Without memories no card moves bytes by itself.
  FabricChannel(const TransportContext& context, std::shared_ptr<Rails> rails,
                std::shared_ptr<CardMemories> memories, const EngineId& peer, Options options);
  ~FabricChannel() override;

  const char* transportName() const override { return options_.name; }
  std::span<std::byte> peerArena() const override { return {}; }
  bool isMadeAgain() const override { return true; }
  uint64_t lifeSigns() const override;
  void beat() override { below_->beat(); }
  // Each of our cards has had an answer from the peer's, or is left out, and one has.
  // And the keys of these regions are here, those of what lasts here over there.
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
  void close() override;

  // The channel underneath. Packets may come before, nothing leaves.
  void attach(std::shared_ptr<Channel> below);
  const std::shared_ptr<Channel>& below() const { return below_; }
  // What a simulated card sends by itself.
  Status carry(ByteView bytes) const;
  // Closed, or the peer has left: nothing to connect again for.
  bool isOver() const;

  // On the loop's thread. What the peer's end told ours; all kinds but kCarried.
  void onControl(control::Kind kind, ByteView bytes);
  void onEnded(const Evidence& evidence);
  // The channel underneath was reconnected. `onPath` runs on the loop's thread, once, when a card
  // has reached the peer since, or at the deadline; none: nobody waits for that.
  void restart();
  void restart(Deadline deadline, std::function<void(Status)> onPath);
  // The engine has been told that it was made again: what has come since lands only now. Whoever
  // waits for something that the break has swallowed must hear of the break before it is served by
  // what came behind it, or it goes on as if nothing were missing at the other end.
  void resume();

  // On a thread that polls.
  void onPacket(size_t rail, const Packet& packet, ByteView data) override;
  bool tick(Clock::time_point now) override;
  void onRenewed(size_t rail) override;

  void onKeysChanged(uint64_t region) override;

  // Number of packets that the peer has not acknowledged.
  size_t unacknowledged() const;
  // Bytes that cards have moved by themselves for us.
  uint64_t moved() const { return moved_.load(std::memory_order_relaxed); }

 private:
  class SendPacket;
  class MovePiece;
  struct Granted {
    std::shared_ptr<control::Grant> grant;  // null: nothing yet
    Clock::time_point askAt;
    bool isAnswered = false;  // also where there is nothing
  };
  // A call of retire() that the peer has not confirmed.
  struct Retiring {
    uint64_t epoch = 0;
    uint64_t lastSerial = 0;     // no later packet carries a part of a cancelled write
    std::set<uint64_t> tickets;  // of RETIRE without an answer
  };
  struct Stopped {
    std::vector<std::shared_ptr<CardTransfer>> transfers;
    bool awaitPeer = false;  // one of them does
    // Until then they may end by themselves; after it their cards are closed.
    Deadline grace = Deadline::at(Clock::time_point::min());
    // By card, when they were taken: later ones have nothing of them.
    std::vector<uint64_t> generations;
  };
  // What beginFence() leaves to fence().
  struct Fencing {
    control::Fenced told;
    Stopped stopped;
  };

  // What cards move by themselves: fabric_cards.cc and fabric_fetches.cc. Under the lock.
  std::shared_ptr<CardTransfer> moveByCards(bool isWrite, bool isOneOfFew,
                                            const RemoteRegion& region, uint64_t offset,
                                            std::span<std::byte> memory, Completion* completion);
  bool askForWrite(const GetRequest& request, control::Fetch& asked);
  void sendFetch(control::Fetch& asked);
  void offer(uint64_t key);
  bool serveByCards(const control::Fetch::One& one, bool isOneOfFew,
                    const std::shared_ptr<ServedFetches>& served);
  std::shared_ptr<control::Grant> grantOf(uint64_t key);
  void moveOn(Clock::time_point now);
  struct Way {
    size_t path = 0;
    RailPeer peer;
  };
  bool isAble(const CardTransfer& transfer, size_t path) const;
  std::optional<Way> wayFor(const CardTransfer& transfer, bool isSplit, Clock::time_point now);
  bool movePiece(const std::shared_ptr<CardTransfer>& transfer, Clock::time_point now);
  void moveOtherwise(const std::shared_ptr<CardTransfer>& transfer, uint64_t position,
                     uint64_t bytes);
  void moveByPackets(const std::shared_ptr<CardTransfer>& transfer, uint64_t position,
                     uint64_t bytes);
  static void voidKeys(control::Grant& grant, size_t card);
  void count(const CardTransfer& transfer, uint64_t bytes);
  void onMoved(const std::shared_ptr<CardTransfer>& transfer, const CardPiece& what, bool hasBegun,
               const NicCompletion& how);  // takes it
  void onPieceFailed(const std::shared_ptr<CardTransfer>& transfer, const CardPiece& what,
                     bool hasBegun, const NicCompletion& how, Clock::time_point now);
  void onPartEnded(uint64_t number, ErrorCode code);
  void giveUp(CardTransfer& transfer, ErrorCode code);
  void giveUpAll(ErrorCode code);
  void endIfOver(const std::shared_ptr<CardTransfer>& transfer);
  void endServed(CardTransfer& transfer);
  void endAsked(const std::shared_ptr<CardTransfer>& transfer);
  bool awaitPackets(uint64_t number);
  bool isHeldUp(Clock::time_point now);
  Stopped takeMoving(const Completion* completion);
  // Without it.
  void stop(const Stopped& stopped, ErrorCode code);
  // Waits until no thread is in stop() with a transfer of this completion; null: with any transfer.
  void awaitStopped(const Completion* completion);
  void onResolve(uint64_t key);
  void onGrant(control::Grant grant);
  void onChanged(uint64_t key);
  void onCard(const control::Card& card);
  void onRetire(const control::Retire& retire);
  void onRetired(uint64_t ticket);
  void onFetch(const control::Fetch& fetch);
  void onFetched(const control::Fetched& fetched);

  // All under the lock.
  Status usable() const;
  Status begin(Completion* completion) const;
  void beginGet(const GetRequest& request, bool isOneOfFew);
  void pump(Clock::time_point now);
  bool submit(size_t path, const std::shared_ptr<OutPacket>& packet);
  std::optional<RailPeer> peerAt(size_t path);
  void apply(PacketStream::Effect effect, const Packet& packet, ByteView data);
  void finish(uint64_t transfer, ErrorCode code);
  void finishAll(ErrorCode code);
  void lose(const Error& why);
  void breakOff(const std::string& why);
  void perhapsBreak();
  void endWait(const Status& how);
  void askCold(Clock::time_point now);
  void activate();
  void sayHello();
  void tell(const Bytes& bytes);
  void flushPuts();
  void onHello(control::Hello hello);
  void onFenced(const control::Fenced& fenced);
  void onState(const control::State& state);
  void ask(Clock::time_point now);
  void onSendFailed(size_t path, uint64_t epoch, const NicCompletion& how);
  void releasePeers();
  static uint64_t newIncarnation();
  void retireWrites(const Stopped& stopped);  // takes it
  void tellOfBreak(const std::string& why);

  const TransportContext& context_;
  const std::shared_ptr<Rails> rails_;
  const std::shared_ptr<CardMemories> memories_;
  const EngineId peer_;
  const Options options_;
  RailShare operations_;  // of this channel

  std::mutex sendMutex_;   // keeps the parts of a message together
  std::mutex fenceMutex_;  // whoever fences, too, returns when that is done

  mutable std::mutex mutex_;        // guards what follows; also while bytes are placed
  std::shared_ptr<Channel> below_;  // constant once it is attached
  std::optional<Error> lost_;       // until restart()
  bool hasLeft_ = false;            // the peer, in peace
  bool closed_ = false;
  bool fenced_ = false;             // the peer, by us
  std::optional<Fencing> fencing_;  // between beginFence() and fence()
  bool isOut_ = false;              // we are, the peer says
  bool isActive_ = false;           // ticked
  uint64_t epoch_ = 0;              // counts restarts
  Clock::time_point standsUntil_;   // at least, where tests break it
  uint64_t heard_ = 0;              // when it was made again

  uint64_t incarnation_ = 0;              // ours: packets for us bear it
  std::optional<control::Hello> theirs_;  // none: nothing can leave yet
  PacketStream stream_;
  std::vector<std::optional<RailPeer>> peers_;  // by path, once it was used
  std::function<void(Status)> onPath_;          // waits for one that leads there
  WarmUp warmUp_;

  std::vector<control::Retire> heldRetires_;
  std::map<uint64_t, Granted> grants_;  // by region of the peer
  std::set<uint64_t> offered_;          // regions of ours of which it has keys
  std::map<uint64_t, std::shared_ptr<CardTransfer>> moving_;  // ours, and those served
  size_t serving_ = 0;                                        // of them
  std::deque<std::shared_ptr<CardTransfer>> unmoved_;         // of which pieces have not begun
  std::vector<std::shared_ptr<CardTransfer>> stopping_;       // taken, until stop() has ended them
  std::condition_variable stopped_;                           // `stopping_` has become shorter
  size_t underWay_ = 0;                                       // pieces that cards have, or wait for
  std::vector<size_t> movingOn_;                              // how many of those, by path
  std::map<uint64_t, Retirement> retirements_;                // by ticket
  std::optional<Clock::time_point> heldUpSince_;
  uint64_t heldUpBy_ = 0;                  // the oldest ticket then
  std::map<uint64_t, Retiring> retiring_;  // by number
  uint64_t lastTicket_ = 0;
  bool hasToldUse_ = false;
  uint64_t question_ = 0;  // the last that was asked
  Clock::time_point askedAt_;
  Bytes arriving_;  // of a message: of the loop's thread
  std::atomic<uint64_t> received_{0};
  std::atomic<uint64_t> moved_{0};
};

}  // namespace mooncake
