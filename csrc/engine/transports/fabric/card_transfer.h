#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/memory/gate.h"
#include "engine/transports/fabric/card_memories.h"
#include "engine/transports/fabric/control.h"

namespace mooncake {

// What the peer has asked for at once, and is answered at once.
struct ServedFetches {
  size_t open = 0;
  control::Fetched answer;
};

// A get or a write whose bytes cards move by themselves, in pieces over all cards that lead there.
// Guarded by its channel's lock, but for what says otherwise.
struct CardTransfer {
  enum class Kind : uint8_t {
    kRead,    // a get: our cards read
    kAsked,   // a get: the peer's cards write it here, and it says when they have
    kWrite,   // ours write
    kServed,  // they write what the peer has asked for
  };
  uint64_t number = 0;
  Kind kind = Kind::kRead;
  uint64_t key = 0, offset = 0;           // over there
  std::span<std::byte> memory;            // here; of a write it is only read
  Completion* completion = nullptr;       // none where it is served
  RemoteSignal announcement;              // of a write
  CardMemories::Local local;              // not where the peer's cards do it
  std::shared_ptr<control::Grant> grant;  // without the cards that it is void for; as `local`
  bool isOneOfFew = false;                // asked for at once, fewer than there are rails
  uint64_t turn = 0;                      // the rail that it begins with
  uint64_t position = 0;                  // behind what has begun
  uint64_t pieces = 0;                    // that have begun
  size_t open = 0;                        // pieces that are not over
  std::optional<ErrorCode> end;           // how, where it does not end well: no piece begins
  bool awaitsPeer = false;  // one of `open`: the peer has not said yet what became of it
  bool isTaken = false;     // stop() ends it, on the thread that took it

  // Where it is served.
  std::shared_ptr<ServedFetches> served;
  RegionTable::Use source;     // of what was asked for; its memory may have been added twice
  control::Fetched::One told;  // of it

  // Any thread. Inside: operations that a card has, of which it may touch the memory.
  Gate gate;
  // Any thread. On which rails one has begun, a bit each.
  std::atomic<uint64_t> rails{0};

  bool writes() const { return kind == Kind::kWrite || kind == Kind::kServed; }
};

// One piece of it, as it is given to a card.
struct CardPiece {
  size_t path = 0;   // our card
  uint8_t card = 0;  // the peer's
  RailPeer peer;
  uint64_t position = 0, bytes = 0;  // in the transfer
  const NicMemory* memory = nullptr;
  NicKey key;
  uint64_t offset = 0;  // in what the key stands for
};

// A piece that failed and may come late: the peer is asked to see to it that it does not.
struct LatePiece {
  std::shared_ptr<CardTransfer> transfer;
  uint64_t position = 0, bytes = 0;
};
struct Retirement {
  std::shared_ptr<control::Grant> grant;
  uint8_t card = 0;
  std::vector<LatePiece> pieces;
};

}  // namespace mooncake
