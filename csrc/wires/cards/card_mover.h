#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "wires/cards/card_transfer.h"
#include "wires/cards/peer_cards.h"
#include "wires/cards/peer_keys.h"
#include "wires/cards/rails.h"
#include "wires/cards/read_backs.h"
#include "wires/cards/retirements.h"
#include "wires/packets/packet_stream.h"

namespace mooncake {

// The transfers that cards move by themselves: cuts them into pieces, and decides about pieces that
// fail. Such a piece goes as packets, or is left to the peer that has asked for it. A failed
// write goes again only when it cannot land late any more. Pieces go out to a function of the
// caller. Under the channel's lock, except for the members that say otherwise.
//
// A write to memory of kReadBack has ended once kernels of the peer's device see it: the cards that
// wrote it have read from there.
class CardMover {
 public:
  // The parts of a channel that move bytes. They live longer than the mover.
  struct Parts {
    Rails& rails;
    CardMemories* memories = nullptr;  // null: no card moves bytes by itself
    PeerCards& cards;
    PeerKeys& keys;
    Retirements& retirements;
    PacketStream& stream;
  };
  CardMover(const char* name, size_t leastByCard, const Parts& parts, control::Tell tell);

  // ---- beginning
  struct Request {
    bool isWrite = false;
    bool isOneOfFew = false;
    PacketStream::Range there;
    std::span<std::byte> memory;
    Completion* completion = nullptr;
    RemoteSignal announcement = {};
  };
  // Returns false if packets, or the peer's cards, have to move the bytes: the transfer is small,
  // the memory is not registered at both ends, the peer has not granted keys yet, or our cards do
  // not read what they have to.
  bool begin(const Request& request);
  // Adds a transfer of the kinds kAsked and kServed.
  void add(const std::shared_ptr<CardTransfer>& transfer);
  // Returns null if there is no such transfer.
  std::shared_ptr<CardTransfer> find(uint64_t number) const;
  // Number of our transfers, and of the peer's that are served here.
  size_t ours() const { return moving_.size() - serving_; }
  size_t serving() const { return serving_; }
  bool isBusy() const { return !unmoved_.empty(); }

  // ---- pieces
  // Calls `submit(piece)` for each piece that a card can begin now. For each of them the caller
  // calls onMoved() later.
  template <typename Submit>
  void moveOn(Clock::time_point now, const Submit& submit) {
    while (auto piece = next(now)) submit(std::move(*piece));
  }
  // Takes the end of a piece. Returns whether it has moved bytes.
  bool onMoved(const CardPiece& piece, bool hasBegun, const NicCompletion& how,
               Clock::time_point now);
  // Calls `submit(piece)` for each piece of which a card is to read the end now. For each of them the
  // caller calls onReadBack() later.
  template <typename Submit>
  void readBack(const Submit& submit) {
    while (auto piece = readBacks_.next()) submit(std::move(*piece));
  }
  void onReadBack(size_t path, bool hasBegun, const NicCompletion& how, Clock::time_point now);
  // Returns whether our cards can write to such memory.
  bool canWrite(const control::Grant& grant) const {
    return (grant.rights & kReadBack) == 0 || parts_.rails.limits(0).closeEndsReads;
  }
  // Moves a piece by packets, which counts as `open` until onPartEnded().
  void moveByPackets(const std::shared_ptr<CardTransfer>& transfer, uint64_t position,
                     uint64_t bytes);
  void onPartEnded(uint64_t number, ErrorCode code);
  // Takes the peer's answer for late pieces.
  void onRetired(uint64_t ticket);
  // Counts bytes that cards have moved for a transfer of ours.
  void count(const CardTransfer& transfer, uint64_t bytes);
  // Bytes that cards have moved for this end. Any thread.
  uint64_t moved() const { return moved_.load(std::memory_order_relaxed); }
  // The peer's card was opened anew: its keys are void.
  void voidKeysOf(size_t card);

  // ---- ends
  // No further piece of the transfer begins. Pieces that cards have end by themselves.
  void giveUp(CardTransfer& transfer, ErrorCode code);
  // Gives up all transfers; `lostParts` are the transfers of dropped packets, one entry for each
  // part. Returns the transfers that the peer's cards may still write: the caller takes our keys
  // back, and then calls endAsked().
  std::vector<std::shared_ptr<CardTransfer>> giveUpAll(ErrorCode code,
                                                       const std::vector<uint64_t>& lostParts);
  // The peer's cards have written the transfer, or never will.
  void endAsked(const std::shared_ptr<CardTransfer>& transfer);

  // Transfers that are taken out, so that a thread can end them without the lock.
  struct Taken {
    std::vector<std::shared_ptr<CardTransfer>> transfers;
    bool awaitPeer = false;  // the peer's cards may write one of them
    // Until then operations may end by themselves. After it their cards are closed.
    Deadline grace = Deadline::at(Clock::time_point::min());
    // By rail, at that time: cards with later generations have none of the operations.
    std::vector<uint64_t> generations;
  };
  // Takes the transfers that count at this completion; null: all. The caller then calls release()
  // and end().
  Taken take(const Completion* completion);
  // Returns when no card touches the memory of these transfers any more: after the grace period
  // cards are closed. `holder` is this end of the channel. Any thread, without the lock.
  void release(const Taken& taken, const KeyHolder* holder);
  void end(const Taken& taken, ErrorCode code);
  // Waits until no other thread is between take() and end() with transfers of this completion, or
  // with any transfers if that is null. After 31 s they end here with kAborted: a thread that hangs
  // must not keep them. `mutex` is the channel's.
  void awaitTaken(Mutex& mutex, const Completion* completion) REQUIRES(mutex);

 private:
  struct Way {
    size_t path = 0;
    RailPeer peer;
  };
  bool isAble(const CardTransfer& transfer, size_t path) const;
  std::optional<Way> wayFor(const CardTransfer& transfer, bool isSplit, Clock::time_point now);
  std::optional<CardPiece> next(Clock::time_point now);
  CardPiece cut(const std::shared_ptr<CardTransfer>& transfer, const Way& way, bool isSplit);
  void fallBack(const std::shared_ptr<CardTransfer>& transfer, uint64_t position, uint64_t bytes);
  void onFailed(const CardPiece& piece, bool hasBegun, const NicCompletion& how,
                Clock::time_point now);
  void fallBackLater(const CardPiece& piece);
  void endIfOver(const std::shared_ptr<CardTransfer>& transfer);
  void endServed(CardTransfer& transfer);

  const char* const name_;
  const size_t leastByCard_;
  const Parts parts_;
  const control::Tell tell_;
  std::map<uint64_t, std::shared_ptr<CardTransfer>> moving_;  // by number
  size_t serving_ = 0;                                        // transfers of kind kServed
  std::deque<std::shared_ptr<CardTransfer>> unmoved_;         // with pieces that have not begun
  size_t underWay_ = 0;                                       // pieces that were submitted
  std::vector<size_t> underWayOn_;                            // the same, by path
  ReadBacks readBacks_;
  std::vector<std::shared_ptr<CardTransfer>> taken_;  // between take() and end()
  Condition ended_;                                   // `taken_` has become shorter
  std::atomic<uint64_t> moved_{0};
};

}  // namespace mooncake
