#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/contract/transfer.h"
#include "engine/memory/gate.h"
#include "wires/cards/card_memories.h"
#include "wires/cards/control.h"

namespace mooncake {

// The fetches of one FETCH that our cards serve. They are answered together.
struct ServedFetches {
  size_t open = 0;  // fetches without an end
  control::Fetched answer;
};

// A get or a write that cards move by themselves, in pieces over all paths that are up. Guarded by
// its channel's lock, except for the members that say otherwise.
struct CardTransfer {
  enum class Kind : uint8_t {
    kRead,    // a get: our cards read
    kAsked,   // a get: the peer's cards write the bytes here, and the peer says when they have
    kWrite,   // our cards write
    kServed,  // our cards write the bytes that the peer has asked for
  };
  uint64_t number = 0;
  Kind kind = Kind::kRead;
  uint64_t key = 0, offset = 0;           // the range in the peer's region
  std::span<std::byte> memory;            // the range here, which a write only reads
  Completion* completion = nullptr;       // null in kServed
  RemoteSignal announcement;              // of a write
  CardMemories::Local local;              // empty in kAsked
  std::shared_ptr<control::Grant> grant;  // the peer's keys, without void ones; null in kAsked
  bool isOneOfFew = false;                // one of a list of fewer transfers than there are rails
  uint64_t firstRail = 0;                 // the rail that it begins with
  uint64_t position = 0;                  // end of the part that has begun
  uint64_t pieces = 0;                    // number of pieces that have begun
  size_t open = 0;                        // number of pieces without an end
  std::optional<ErrorCode> error;         // set when it is given up: no further piece begins
  bool awaitsPeer = false;                // one of `open` is the answer of the peer, in kAsked
  bool isTaken = false;  // CardMover::take() has it; the thread that took it ends it

  // In kServed.
  std::shared_ptr<ServedFetches> served;
  RegionTable::Use source;       // keeps the memory; `local` may be of another region with it
  control::Fetched::One answer;  // for this fetch

  // Any thread. Inside are operations of cards, which may touch the memory.
  Gate gate;
  // Any thread. The rails on which an operation has begun, one bit each.
  std::atomic<uint64_t> rails{0};

  bool writes() const { return kind == Kind::kWrite || kind == Kind::kServed; }
  // Whether its cards read back what they have written.
  bool isReadBack() const { return writes() && (grant->rights & kReadBack) != 0; }
  bool hasAllBegun() const { return error || position == memory.size(); }
};

// One piece of a transfer, for one card.
struct CardPiece {
  std::shared_ptr<CardTransfer> transfer;
  size_t path = 0;
  uint8_t card = 0;  // of the peer
  RailPeer peer;
  uint64_t position = 0, bytes = 0;  // in the transfer
  const NicMemory* memory = nullptr;
  NicKey key;
  uint64_t offset = 0;  // in the memory of the key
};

// A piece of a write that failed and may still land.
struct LatePiece {
  std::shared_ptr<CardTransfer> transfer;
  uint64_t position = 0, bytes = 0;
};

}  // namespace mooncake
