#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "wires/cards/card_transfer.h"
#include "wires/cards/control.h"

namespace mooncake {

// The questions to the peer that make sure that no write lands late: RETIRE names a region and a
// card, and the answer RETIRED says that nothing lands there any more that began under the keys of
// before. Under the channel's lock.
class Retirements {
 public:
  explicit Retirements(control::Tell tell) : tell_(std::move(tell)) {}

  // ---- pieces that a card reported as failed
  // Adds a piece that may still land, and asks the peer. One question serves all pieces under the
  // same keys. Returns true if the question is new: then the keys must not be used any more.
  bool add(LatePiece piece, uint8_t card);
  // Drops the pieces for which `isDropped(piece)` holds.
  template <typename IsDropped>
  void dropPieces(const IsDropped& isDropped) {
    for (auto& [ticket, late] : late_) std::erase_if(late.pieces, isDropped);
  }
  // Returns the pieces that wait, and forgets the questions.
  std::vector<LatePiece> takeAll();
  // Returns the number of the oldest question, or 0.
  uint64_t oldest() const { return late_.empty() ? 0 : late_.begin()->first; }

  // ---- regions (Channel::retire)
  // Asks for all cards of the peer. `lastSerial` is the last packet that carries a part of a
  // cancelled write. Returns a number for isOver().
  uint64_t begin(uint64_t region, size_t cards, uint64_t epoch, uint64_t lastSerial);
  // A call of begin() that is not over.
  struct Call {
    uint64_t epoch = 0;  // the connection of the questions
    uint64_t lastSerial = 0;
    std::set<uint64_t> tickets;  // questions without an answer
  };
  // Returns null if the call is over, or unknown.
  const Call* find(uint64_t number) const;
  void forget(uint64_t number) { calls_.erase(number); }
  void forgetCalls() { calls_.clear(); }

  // Asks for one region without waiting for the answers.
  void ask(uint64_t region, size_t cards);
  // Takes an answer. Returns the pieces that cannot land any more.
  std::vector<LatePiece> onRetired(uint64_t ticket);

 private:
  struct Late {
    std::shared_ptr<control::Grant> grant;
    uint8_t card = 0;
    std::vector<LatePiece> pieces;
  };

  const control::Tell tell_;
  uint64_t lastTicket_ = 0;
  std::map<uint64_t, Late> late_;   // by ticket
  std::map<uint64_t, Call> calls_;  // by number, which is a ticket of no question
};

}  // namespace mooncake
